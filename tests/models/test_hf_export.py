from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.models import hf_export
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_export import WeightFormat, save_params
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.hf_tensors import param_leaves

FLOAT32 = WeightFormat(dtype="float32")


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 30_000])
def test_import_export_import_is_bit_identical(golden, tmp_path, single_device, max_file_bytes):
    target = tmp_path / "model"
    save_params(
        golden.params,
        golden.config,
        directory=target,
        weight_format=WeightFormat(dtype="float32", max_file_bytes=max_file_bytes),
    )
    assert read_config(target) == golden.config
    again = load_params(
        target, golden.config, shardings=single_device(golden.config), dtype="float32"
    )
    jax.tree.map(np.testing.assert_array_equal, again, golden.params)
    split = (target / "model.safetensors.index.json").is_file()
    assert split == (max_file_bytes == 30_000)


def test_parts_stay_below_the_limit_and_the_index_names_them(golden_qwen2, tmp_path):
    weight_format = WeightFormat(dtype="bfloat16", max_file_bytes=10_000)
    save_params(
        golden_qwen2.params,
        golden_qwen2.config,
        directory=tmp_path / "model",
        weight_format=weight_format,
    )
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    assert all(file.stat().st_size < 10_000 + 2_000 for file in files)  # 2 kB for the header
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == 2 * golden_qwen2.config.num_parameters


def test_bfloat16_rounds_to_nearest(golden_qwen2, tmp_path, single_device):
    config = golden_qwen2.config
    save_params(golden_qwen2.params, config, directory=tmp_path / "model")
    again = load_params(
        tmp_path / "model", config, shardings=single_device(config), dtype="float32"
    )
    expected = golden_qwen2.params["layers"]["gate"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(again["layers"]["gate"], expected)
    assert json.loads((tmp_path / "model/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.fixture
def source(golden_qwen2, tmp_path):
    """A model directory with all that belongs to generation, and a few things that do not."""
    directory = tmp_path / "source"
    directory.mkdir()
    raw = json.loads((golden_qwen2.directory / "config.json").read_text())
    raw |= {"eos_token_id": 5, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(raw))
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md"):
        (directory / name).write_text(f"content of {name}")
    return directory


def test_companions_and_token_ids_come_from_the_source(golden_qwen2, tmp_path, source):
    target = tmp_path / "model"
    save_params(
        golden_qwen2.params,
        golden_qwen2.config,
        directory=target,
        sources=[source],
        weight_format=FLOAT32,
    )
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (target / "tokenizer.json").read_text() == "content of tokenizer.json"
    raw = json.loads((target / "config.json").read_text())
    assert (raw["eos_token_id"], raw["torch_dtype"]) == (5, "float32")
    assert read_config(target) == golden_qwen2.config
    assert not {"dtype", "rope_parameters"} & raw.keys()  # said in the older form only


def test_a_tokenizer_from_elsewhere_replaces_the_sources(golden_qwen2, tmp_path, source):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("another tokenizer")
    save_params(
        golden_qwen2.params,
        golden_qwen2.config,
        directory=tmp_path / "model",
        sources=[source, tokenizer],
    )
    assert (tmp_path / "model/tokenizer.json").read_text() == "another tokenizer"
    kept = tmp_path / "model/generation_config.json"
    assert kept.read_text() == "content of generation_config.json"


def test_a_source_of_another_model_is_refused(golden_smollm, tmp_path, source):
    with pytest.raises(ValueError, match="describes another model"):
        save_params(
            golden_smollm.params,
            golden_smollm.config,
            directory=tmp_path / "model",
            sources=[source],
        )
    assert not (tmp_path / "model").exists()


def test_params_of_another_shape_leave_no_directory(golden_qwen2, tmp_path):
    params = golden_qwen2.params | {"final_norm": jnp.ones((31,))}
    with pytest.raises(ValueError, match=r"params final_norm has shape \(31,\)"):
        save_params(params, golden_qwen2.config, directory=tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_export_leaves_no_directory(golden_qwen2, tmp_path, monkeypatch):
    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_params(golden_qwen2.params, golden_qwen2.config, directory=tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_kept(golden_qwen2, tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(ValueError, match="already exists"):
        save_params(golden_qwen2.params, golden_qwen2.config, directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]


def test_only_one_leaf_is_on_the_host_at_a_time(golden_qwen2, monkeypatch):
    fetched = []
    real = np.asarray
    monkeypatch.setattr(hf_export.np, "asarray", lambda x: fetched.append(x.shape) or real(x))
    tensors = hf_export.host_tensors(golden_qwen2.params, param_leaves(golden_qwen2.config))
    next(tensors)
    assert len(fetched) == 1
    assert len(list(tensors)) == 26
    assert len(fetched) == len(jax.tree.leaves(golden_qwen2.params))

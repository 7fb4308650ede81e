from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.hf_tensors import tensor_shapes
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.models.safetensors_file import read_header, write_file


def _stored(directory) -> dict[str, np.ndarray]:
    values = {}
    for path in directory.glob("*.safetensors"):
        values |= {name: np.array(x.open()) for name, x in read_header(path).items()}
    return values


def _rewrite(source, target, change) -> None:
    """A copy of `source` in one float32 file, its tensors passed through `change`."""
    values = _stored(source)
    change(values)
    shutil.copy(source / "config.json", target)
    shapes = {name: value.shape for name, value in values.items()}
    write_file(target / "model.safetensors", shapes, dtype="float32", tensors=iter(values.values()))


def _load(directory, single_device):
    config = read_config(directory)
    return load_params(directory, config, shardings=single_device(config), dtype="float32")


def test_matrices_are_transposed_and_stacked(golden_qwen2):
    stored = _stored(golden_qwen2.directory)
    layers = golden_qwen2.params["layers"]
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        np.testing.assert_array_equal(
            layers["down"][layer], stored[f"{prefix}.mlp.down_proj.weight"].T
        )
        np.testing.assert_array_equal(
            layers["key_bias"][layer], stored[f"{prefix}.self_attn.k_proj.bias"]
        )
    np.testing.assert_array_equal(golden_qwen2.params["unembedding"], stored["lm_head.weight"])


@pytest.mark.parametrize("axes", [{"data": 1, "fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 2}])
def test_every_device_gets_its_shard(golden, axes):
    devices = np.array(jax.devices()[:4]).reshape(tuple(axes.values()))
    shardings = param_shardings(golden.config, Mesh(devices, tuple(axes)))
    if golden.config.num_query_heads == 9:  # only replicates over tensor=2
        shardings = jax.tree.map(lambda s: s.update(spec=()), shardings)
    params = load_params(golden.directory, golden.config, shardings=shardings, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, params, golden.params)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings


def test_dtype_is_converted_on_the_way(golden_qwen2, single_device):
    params = load_params(
        golden_qwen2.directory,
        golden_qwen2.config,
        shardings=single_device(golden_qwen2.config),
        dtype="bfloat16",
    )
    expected = np.asarray(golden_qwen2.params["layers"]["up"]).astype(ml_dtypes.bfloat16)
    assert params["layers"]["up"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["layers"]["up"], expected)


def test_all_that_does_not_fit_is_named_at_once(golden_qwen2, tmp_path, single_device):
    def change(values):
        del values["model.layers.1.self_attn.q_proj.bias"], values["lm_head.weight"]
        values["model.layers.0.mlp.up_proj.weight"] = np.zeros((48, 31))
        values["model.layers.2.input_layernorm.weight"] = np.zeros(32)
        values["score.weight"] = np.zeros((1, 32))

    _rewrite(golden_qwen2.directory, tmp_path, change)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as caught:
        _load(tmp_path, single_device)
    message = str(caught.value)
    assert "missing: model.layers.1.self_attn.q_proj.bias, lm_head.weight" in message
    assert "unknown: model.layers.2.input_layernorm.weight, score.weight" in message
    assert "model.layers.0.mlp.up_proj.weight [48, 31], expected [48, 32]" in message


def test_long_lists_are_cut(golden_qwen2, tmp_path, single_device):
    _rewrite(golden_qwen2.directory, tmp_path, lambda values: values.clear())
    with pytest.raises(ValueError, match="and 7 more"):  # 27 tensors, 20 shown
        _load(tmp_path, single_device)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named(golden_qwen2, tmp_path, single_device, value):
    name = "model.layers.1.mlp.up_proj.weight"

    def change(values):
        values[name][3, 2] = value
        values["model.norm.weight"][0] = value

    _rewrite(golden_qwen2.directory, tmp_path, change)
    with pytest.raises(ValueError, match="NaN or infinite values in its weights: ") as caught:
        _load(tmp_path, single_device)
    named = str(caught.value).split("weights: ")[1].split(". Fetch")[0]
    assert set(named.split(", ")) == {name, "model.norm.weight"}


def test_tied_models_may_store_the_matrix_twice(golden_smollm, tmp_path, single_device):
    def change(values):
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
        values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2)

    _rewrite(golden_smollm.directory, tmp_path, change)
    loaded = _load(tmp_path, single_device)
    jax.tree.map(np.testing.assert_array_equal, loaded, golden_smollm.params)


def test_tied_models_may_not_store_two_matrices(golden_smollm, tmp_path, single_device):
    def change(values):
        values["lm_head.weight"] = values["model.embed_tokens.weight"] + 1e-3

    _rewrite(golden_smollm.directory, tmp_path, change)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        _load(tmp_path, single_device)


def test_unsupported_dtypes_are_named(golden_smollm, tmp_path, single_device):
    path = tmp_path / "model.safetensors"
    _rewrite(golden_smollm.directory, tmp_path, lambda values: None)
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
    with pytest.raises(ValueError, match=r"of an unsupported dtype: model\.\S+ I32"):
        _load(tmp_path, single_device)


def test_directories_without_weights(golden_qwen2, tmp_path, single_device):
    shutil.copy(golden_qwen2.directory / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor model\.safe"):
        _load(tmp_path, single_device)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        _load(tmp_path, single_device)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks model-1\.safetensors named in"):
        _load(tmp_path, single_device)


# Not `resource.getrusage`: a child begins with the peak of the process that started it.
_MEASURE = r"""
    import re, sys
    from pathlib import Path
    import jax
    from jax.sharding import SingleDeviceSharding
    from pipeline_rl_jax.models.hf_config import read_config
    from pipeline_rl_jax.models.hf_import import load_params
    from pipeline_rl_jax.models.transformer import abstract_params

    directory = Path(sys.argv[1])
    def kilobytes(key):
        return int(re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    config = read_config(directory)
    sharding = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: sharding, abstract_params(config))
    jax.block_until_ready(jax.device_put(1.0, sharding))
    before = kilobytes("VmRSS")
    params = load_params(directory, config, shardings=shardings, dtype="float32")
    print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's process status")
def test_a_model_never_exists_twice_in_host_memory(golden_qwen2, tmp_path):
    config = dataclasses.replace(
        golden_qwen2.config, vocabulary_size=8192, width=512, mlp_width=2048, num_layers=10,
        num_query_heads=8, head_width=64,
    )  # fmt: skip
    raw = json.loads((golden_qwen2.directory / "config.json").read_text())
    raw |= {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048}
    raw |= {"num_hidden_layers": 10, "num_attention_heads": 8, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shapes = tensor_shapes(config)
    ones = (np.ones(shape, np.float32) for shape in shapes.values())
    path = tmp_path / "model.safetensors"
    write_file(path, shapes, dtype="float32", tensors=ones)
    size = path.stat().st_size
    assert size > 180e6
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_MEASURE), str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    grown = int(run.stdout)
    assert size < grown < 1.6 * size  # the params themselves, and about one stacked leaf

"""Live comparison with transformers: the same directory, read by both."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from pipeline_rl_jax.models.hf_export import WeightFormat, save_params

pytestmark = pytest.mark.parity


def _transformers_logits(directory, token_ids) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor(token_ids, dtype=torch.long)).logits.numpy()


def test_both_read_the_same_directory_alike(golden, forward):
    token_ids = np.random.default_rng(1).integers(0, 64, (3, 50))
    expected = _transformers_logits(golden.directory, token_ids)
    result = forward(golden.params, golden.config, token_ids)
    np.testing.assert_allclose(result, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("keep_source_config", [True, False])
def test_transformers_loads_what_we_export(golden, tmp_path, keep_source_config):
    save_params(
        golden.params,
        golden.config,
        directory=tmp_path / "model",
        sources=[golden.directory] if keep_source_config else [],
        weight_format=WeightFormat(dtype="float32", max_file_bytes=30_000),
    )
    exported = _transformers_logits(tmp_path / "model", golden.token_ids)
    np.testing.assert_allclose(exported, golden.logits, atol=1e-5, rtol=0)


def test_greedy_text_is_identical_after_an_export(golden, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = tmp_path / "source"
    shutil.copytree(golden.directory, source)
    ends = {"eos_token_id": [3, 11], "pad_token_id": 0}
    (source / "generation_config.json").write_text(json.dumps(ends))
    weight_format = WeightFormat(dtype="float32")
    save_params(
        golden.params,
        golden.config,
        directory=tmp_path / "model",
        sources=[source],
        weight_format=weight_format,
    )

    def generate(directory):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        assert model.generation_config.eos_token_id == [3, 11]
        prompts = torch.tensor(golden.token_ids[:, :6], dtype=torch.long)
        return model.generate(prompts, max_new_tokens=24, do_sample=False).numpy()

    np.testing.assert_array_equal(generate(tmp_path / "model"), generate(source))

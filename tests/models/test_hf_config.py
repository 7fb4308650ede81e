from __future__ import annotations

import dataclasses
import json
import math

import pytest

from pipeline_rl_jax.models.config import ModelConfig, RopeScaling
from pipeline_rl_jax.models.hf_config import parse_config, raw_config, read_config

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _parse(raw: dict, **changes) -> ModelConfig:
    return parse_config(raw | changes, origin="config.json")


def test_llama_3_2():
    assert _parse(LLAMA_3_2_1B) == ModelConfig(
        family="llama",
        vocabulary_size=128256,
        width=2048,
        mlp_width=8192,
        num_layers=16,
        num_query_heads=32,
        num_kv_heads=8,
        head_width=64,
        max_positions=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            factor=32.0,
            low_frequency_factor=1.0,
            high_frequency_factor=4.0,
            original_max_positions=8192,
        ),
        norm_epsilon=1e-5,
        tied_embeddings=True,
    )


# The published sizes: 1.24B, 7.62B and 0.60B (0.44B without the tied embedding).
@pytest.mark.parametrize(
    ("raw", "num_parameters"),
    [
        (LLAMA_3_2_1B, 1_235_814_400),
        (QWEN2_5_7B, 7_615_616_512),
        (QWEN3_0_6B, 596_049_920),
    ],
)
def test_number_of_parameters_of_published_models(raw, num_parameters):
    assert _parse(raw).num_parameters == num_parameters


def test_families_have_their_switches():
    qwen2, qwen3 = _parse(QWEN2_5_7B), _parse(QWEN3_0_6B)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_width) == (True, False, 128)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_width) == (False, True, 128)


def test_rope_parameters_of_transformers_5_mean_the_same():
    raw = {k: v for k, v in LLAMA_3_2_1B.items() if k not in ("rope_theta", "rope_scaling")}
    rope = LLAMA_3_2_1B["rope_scaling"] | {"rope_theta": 500000.0}
    assert _parse(raw, rope_parameters=rope) == _parse(LLAMA_3_2_1B)
    plain = {k: v for k, v in QWEN3_0_6B.items() if k not in ("rope_theta", "rope_scaling")}
    rope = {"rope_type": "default", "rope_theta": 1000000}
    assert _parse(plain, rope_parameters=rope) == _parse(QWEN3_0_6B)


def test_keys_a_checkpoint_may_leave_out():
    optional = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling")
    raw = {k: v for k, v in LLAMA_3_2_1B.items() if k not in (*optional, "architectures")}
    config = _parse(raw, max_position_embeddings=None)
    assert config.family == "llama"
    assert (config.head_width, config.num_kv_heads, config.max_positions) == (64, 32, 2048)
    assert (config.norm_epsilon, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)


@pytest.mark.parametrize("raw", [LLAMA_3_2_1B, QWEN2_5_7B, QWEN3_0_6B])
def test_what_is_written_reads_the_same(raw):
    config = _parse(raw)
    assert parse_config(raw_config(config, dtype="bfloat16"), origin="again") == config


def test_flags_that_do_not_fit_the_family_are_not_written(tiny_config):
    with pytest.raises(ValueError, match="only qwen2 has biases"):
        raw_config(dataclasses.replace(tiny_config, family="llama"), dtype="float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            r"architectures \(MixtralForCausalLM\) is not supported; supported are "
            "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "gpt2"}, r"architectures \(none\)"),
        ({"hidden_act": "gelu"}, r"hidden_act \(gelu\) is not supported; only silu"),
        ({"attention_bias": True}, r"attention_bias \(True\)"),
        ({"mlp_bias": True}, r"mlp_bias \(True\)"),
        ({"use_sliding_window": True}, r"use_sliding_window \(True\)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"\(sliding_attention\)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_type \(yarn\)"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, r"rope_type \(linear\)"),
        ({"rope_scaling": "llama3"}, r"rope_scaling \('llama3'\) must be a JSON object"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor \(0.5\)"),
        ({"hidden_size": "wide"}, r"hidden_size \('wide'\) must be a positive integer"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers \(0\) must be a positive integer"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers \(1000000000\) must be at most 10000"),
        ({"rms_norm_eps": math.inf}, r"rms_norm_eps \(inf\) must be a positive number"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps \(-1.0\) must be a positive number"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 5}, r"\(32\) must be a multiple of num_key_value_heads \(5\)"),
        ({"head_dim": 63}, r"head_dim \(63\) must be even"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        _parse(LLAMA_3_2_1B, **changes)
    assert str(caught.value).startswith("config.json: ")


def test_a_directory_without_a_readable_config(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Llama')
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_7B))
    assert read_config(tmp_path).family == "qwen2"

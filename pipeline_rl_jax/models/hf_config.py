"""`config.json` of a Hugging Face model directory ↔ `ModelConfig`.

Owns which architectures and switches are supported and says clearly which are not. Reads the layout
of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`); writes the former, which
both load. Does not own token ids or generation defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline_rl_jax.models.config import ModelConfig, RopeScaling

Family = Literal["llama", "qwen2", "qwen3"]
RawConfig = Mapping[str, Any]

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes when a checkpoint leaves the key out.
_DEFAULT_MAX_POSITIONS: Mapping[Family, int] = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_QWEN3_DEFAULT_HEAD_WIDTH = 128
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_NORM_EPSILON = 1e-6
_MAX_LAYERS = 10_000  # what goes through them one by one would never end

# Switches whose value changes the arithmetic, with the one value that we compute.
_FIXED_SWITCHES: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,  # Qwen2's q/k/v biases do not depend on this key
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def read_config(directory: Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face model directory; ValueError when it is not supported."""
    return parse_config(read_raw_config(directory), origin=str(directory / "config.json"))


def read_raw_config(directory: Path) -> dict[str, Any]:
    """The JSON object in `directory/config.json`; ValueError when it is absent or malformed."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} holds no config.json; give a Hugging Face model directory")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(raw).__name__}")
    return raw


def parse_config(raw: RawConfig, *, origin: str) -> ModelConfig:
    """`raw` as a `ModelConfig`. `origin` names the file in errors (ValueError)."""
    family = _family(raw, origin)
    _check_switches(raw, origin)
    width = _size(raw, "hidden_size", origin)
    num_query_heads = _size(raw, "num_attention_heads", origin)
    config = ModelConfig(
        family=family,
        vocabulary_size=_size(raw, "vocab_size", origin),
        width=width,
        mlp_width=_size(raw, "intermediate_size", origin),
        num_layers=_size(raw, "num_hidden_layers", origin),
        num_query_heads=num_query_heads,
        num_kv_heads=_size(raw, "num_key_value_heads", origin, default=num_query_heads),
        head_width=_head_width(raw, family, origin),
        max_positions=_size(
            raw, "max_position_embeddings", origin, default=_DEFAULT_MAX_POSITIONS[family]
        ),
        rope_theta=_rope_theta(raw, origin),
        rope_scaling=_rope_scaling(raw, origin),
        norm_epsilon=_number(raw, "rms_norm_eps", origin, default=_DEFAULT_NORM_EPSILON),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )
    if config.num_layers > _MAX_LAYERS:
        raise ValueError(
            f"{origin}: num_hidden_layers ({config.num_layers}) must be at most {_MAX_LAYERS}"
        )
    _check_heads(config, origin)
    return config


def raw_config(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """`config` as a config.json that transformers 4 and 5 load; `dtype` is that of the weights."""
    if (config.qkv_bias, config.qk_norm) != (config.family == "qwen2", config.family == "qwen3"):
        raise ValueError(
            f"family ({config.family}) does not go with qkv_bias ({config.qkv_bias}) and "
            f"qk_norm ({config.qk_norm}); only qwen2 has biases, only qwen3 has head norms"
        )
    architecture = next(name for name, family in ARCHITECTURES.items() if family == config.family)
    raw: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": dtype,
    }
    if config.rope_scaling is not None:
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_frequency_factor,
            "high_freq_factor": config.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    raw["mlp_bias" if config.family == "llama" else "use_sliding_window"] = False
    return raw


def _family(raw: RawConfig, origin: str) -> Family:
    names = raw.get("architectures") or []
    if not names and raw.get("model_type") in ARCHITECTURES.values():
        return raw["model_type"]
    if len(names) == 1 and names[0] in ARCHITECTURES:
        return ARCHITECTURES[names[0]]
    raise ValueError(
        f"{origin}: architectures ({', '.join(map(str, names)) or 'none'}) is not supported; "
        f"supported are {', '.join(ARCHITECTURES)}"
    )


def _check_switches(raw: RawConfig, origin: str) -> None:
    for key, computed in _FIXED_SWITCHES.items():
        value = raw.get(key)
        if value is not None and value != computed:
            raise ValueError(f"{origin}: {key} ({value}) is not supported; only {computed} is")
    layer_types = set(raw.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ValueError(
            f"{origin}: layer_types ({', '.join(sorted(layer_types))}) is not supported; "
            "only full_attention is"
        )


def _check_heads(config: ModelConfig, origin: str) -> None:
    if config.num_query_heads % config.num_kv_heads:
        raise ValueError(
            f"{origin}: num_attention_heads ({config.num_query_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.head_width % 2:
        raise ValueError(
            f"{origin}: head_dim ({config.head_width}) must be even, rotary positions turn pairs"
        )


def _head_width(raw: RawConfig, family: Family, origin: str) -> int:
    if raw.get("head_dim") is not None:
        return _size(raw, "head_dim", origin)
    if family == "qwen3":
        return _QWEN3_DEFAULT_HEAD_WIDTH
    return _size(raw, "hidden_size", origin) // _size(raw, "num_attention_heads", origin)


def _rope(raw: RawConfig, origin: str) -> RawConfig:
    """The rope dictionary of either layout, empty when there is none."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{origin}: rope_scaling ({rope!r}) must be a JSON object or null")
    return rope


def _rope_theta(raw: RawConfig, origin: str) -> float:
    rope = _rope(raw, origin)
    holder = rope if "rope_theta" in rope else raw
    return _number(holder, "rope_theta", origin, default=_DEFAULT_ROPE_THETA)


def _rope_scaling(raw: RawConfig, origin: str) -> RopeScaling | None:
    rope = _rope(raw, origin)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{origin}: partial_rotary_factor ({rope['partial_rotary_factor']}) is not supported; "
            "only 1.0 is"
        )
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise ValueError(
            f"{origin}: rope_type ({rope_type}) is not supported; default and llama3 are"
        )
    scaling = RopeScaling(
        factor=_number(rope, "factor", origin),
        low_frequency_factor=_number(rope, "low_freq_factor", origin),
        high_frequency_factor=_number(rope, "high_freq_factor", origin),
        original_max_positions=_size(rope, "original_max_position_embeddings", origin),
    )
    if scaling.high_frequency_factor <= scaling.low_frequency_factor:
        raise ValueError(
            f"{origin}: high_freq_factor ({scaling.high_frequency_factor}) must be above "
            f"low_freq_factor ({scaling.low_frequency_factor})"
        )
    return scaling


def _size(raw: RawConfig, key: str, origin: str, *, default: int | None = None) -> int:
    value = _value(raw, key, origin, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{origin}: {key} ({value!r}) must be a positive integer")
    return value


def _number(raw: RawConfig, key: str, origin: str, *, default: float | None = None) -> float:
    value = _value(raw, key, origin, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{origin}: {key} ({value!r}) must be a positive number")
    return float(value)


def _value(raw: RawConfig, key: str, origin: str, default: int | float | None) -> Any:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{origin}: {key} is missing")
    return value

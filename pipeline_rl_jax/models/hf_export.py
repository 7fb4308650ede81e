"""A parameter tree as a Hugging Face directory that transformers loads.

Owns config.json, the safetensors files and their index, and which files of the source directory go
along (tokenizer, chat template, generation defaults). The directory appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline_rl_jax.models.atomic_directory import atomic_directory
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import raw_config, read_config, read_raw_config
from pipeline_rl_jax.models.hf_tensors import ParamLeaf, leaf_shapes, param_leaves
from pipeline_rl_jax.models.safetensors_file import element_bytes, write_file

# Everything beside weights and config.json that decides what text goes in and comes out.
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Keys of the source's config.json that `raw_config` says in another way.
_REPLACED_KEYS = ("rope_parameters", "dtype")

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How weights are stored."""

    dtype: str = "bfloat16"
    max_file_bytes: int = 5_000_000_000  # transformers' own limit; larger models are split


def save_params(
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    directory: Path,
    sources: Sequence[Path] = (),
    weight_format: WeightFormat = WeightFormat(),
) -> None:
    """Writes `params` (fully addressable from this process) to `directory`.

    One leaf at a time is fetched to the host. The `COMPANION_FILES` of all `sources` go along, a
    later source's over an earlier one's; the first is where the model came from and also lends
    what else its config.json says. ValueError when that describes another model, or when
    `directory` holds something already.
    """
    raw = raw_config(config, dtype=weight_format.dtype)
    if sources:
        raw = merged_config(raw, sources[0], is_same=read_config(sources[0]) == config)
    with atomic_directory(directory) as partial:
        leaves = param_leaves(config)
        write_weights(partial, leaf_shapes(leaves), host_tensors(params, leaves), weight_format)
        write_json(partial / "config.json", raw)
        for source in sources:
            copy_companions(source, partial)


def write_weights(
    directory: Path, shapes: Shapes, tensors: Iterable[np.ndarray], weight_format: WeightFormat
) -> None:
    """Writes `model.safetensors`, or numbered parts and their index above the size limit.

    `tensors` come in the order of `shapes` and are consumed one by one.
    """
    parts = _split(shapes, weight_format)
    remaining = iter(tensors)
    if len(parts) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        arrays = (next(remaining) for _ in range(len(part)))
        write_file(directory / name, part, dtype=weight_format.dtype, tensors=arrays)
    if len(parts) > 1:
        total = sum(math.prod(shape) for shape in shapes.values())
        index = {
            "metadata": {"total_size": total * element_bytes(weight_format.dtype)},
            "weight_map": {
                tensor: name for name, part in zip(names, parts, strict=True) for tensor in part
            },
        }
        write_json(directory / "model.safetensors.index.json", index)


def copy_companions(source: Path, target: Path) -> None:
    """Copies those `COMPANION_FILES` that exist in `source`, over any in `target`."""
    for name in COMPANION_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes `value` indented, with a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def merged_config(raw: dict[str, Any], source: Path, *, is_same: bool) -> dict[str, Any]:
    """`raw` and what else the config.json in `source` says; ValueError unless it `is_same`."""
    if not is_same:
        raise ValueError(
            f"{source / 'config.json'} describes another model than the weights; "
            "give the directory this model was trained from"
        )
    kept = {k: v for k, v in read_raw_config(source).items() if k not in _REPLACED_KEYS}
    return kept | raw


def host_tensors(params: Mapping[str, Any], leaves: Iterable[ParamLeaf]) -> Iterator[np.ndarray]:
    """The checkpoint tensors of these leaves in turn; one leaf at a time is on the host."""
    for leaf in leaves:
        value: Any = params
        for key in leaf.path:
            value = value[key]
        if value.shape != leaf.shape:
            raise ValueError(
                f"params {'.'.join(leaf.path)} has shape {value.shape}, the config asks for "
                f"{leaf.shape}"
            )
        array = np.asarray(value)
        if not leaf.stacked:
            yield array
            continue
        for layer in array:
            yield layer.T if leaf.transposed else layer


def _split(shapes: Shapes, weight_format: WeightFormat) -> list[dict[str, tuple[int, ...]]]:
    """Consecutive parts below the size limit; a tensor above it has a part to itself."""
    limit = weight_format.max_file_bytes // element_bytes(weight_format.dtype)
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if parts[-1] and filled + size > limit:
            parts.append({})
            filled = 0
        parts[-1][name] = shape
        filled += size
    return parts

"""Weights of a Hugging Face directory, straight to their place on the devices.

Owns finding and checking the tensors and the copy from the memory-mapped file into each device's
shard, one shard of one leaf at a time: a model never exists twice in host memory. The names are in
`hf_tensors.py`, the file format in `safetensors_file.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_tensors import (
    EMBEDDING_NAME,
    UNEMBEDDING_NAME,
    ParamLeaf,
    param_leaves,
    tensor_shapes,
)
from pipeline_rl_jax.models.safetensors_file import StoredTensor, read_header

_COMPARED_ROWS = 4096  # rows of an embedding compared at once
_MAX_NAMES_LISTED = 20


def load_params(
    directory: Path, config: ModelConfig, *, shardings: dict, dtype: str
) -> dict[str, Any]:
    """The parameter tree of `transformer.abstract_params`, every leaf on its sharding.

    Args:
      directory: holds `model.safetensors`, or `model.safetensors.index.json` and its parts.
      config: what the tensors must fit.
      shardings: a `Sharding` at every leaf of the tree.
      dtype: of the result; values are converted on the way.

    Raises:
      ValueError: one message with all tensors that are missing, unknown or of the wrong shape, or
        with those that hold NaN or infinite values.
    """
    tensors = find_tensors(directory)
    check_tensors(tensors, config, directory=directory)
    return load_leaves(param_leaves(config), tensors, shardings=shardings, dtype=dtype)


def load_leaves(
    leaves: Iterable[ParamLeaf],
    tensors: Mapping[str, StoredTensor],
    *,
    shardings: dict,
    dtype: str,
) -> dict[str, Any]:
    """The tree of these leaves, each on its sharding; the tensors' shapes have been checked.

    ValueError naming tensors with values that are not finite.
    """
    params: dict[str, Any] = {}
    broken: list[str] = []
    for leaf in leaves:
        parent, sharding = params, shardings
        for key in leaf.path[:-1]:
            parent, sharding = parent.setdefault(key, {}), sharding[key]
        array = _load_leaf(leaf, tensors, sharding[leaf.path[-1]], jnp.dtype(dtype))
        parent[leaf.path[-1]] = array
        finite = np.atleast_1d(_finite_parts(array, stacked=leaf.stacked))
        broken += [
            name for name, is_finite in zip(leaf.tensor_names, finite, strict=True) if not is_finite
        ]
    if broken:
        raise ValueError(
            f"{tensors[broken[0]].path.parent} has NaN or infinite values in its weights: "
            f"{_listed(broken)}. Fetch the model again, or use another checkpoint"
        )
    return params


@functools.partial(jax.jit, static_argnames="stacked")
def _finite_parts(array: jax.Array, *, stacked: bool) -> jax.Array:
    """Whether all values are finite, of each layer when stacked."""
    return jnp.all(jnp.isfinite(array), axis=tuple(range(int(stacked), array.ndim)))


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor stored in a model directory, by name."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise ValueError(
            f"{directory} holds neither {single.name} nor {index.name}; weights in another format "
            "must be saved as safetensors first"
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index; fetch it again") from error
    absent = sorted(name for name in names if not (directory / name).is_file())
    if absent:
        raise ValueError(f"{directory} lacks {_listed(absent)} named in {index.name}; fetch them")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(names):
        tensors |= read_header(directory / name)
    return tensors


def check_tensors(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, *, directory: Path
) -> None:
    """ValueError naming every missing, unknown, misshapen or unreadable tensor at once."""
    check_shapes(
        tensors,
        tensor_shapes(config),
        directory=directory,
        ignored=(UNEMBEDDING_NAME,) if config.tied_embeddings else (),
    )
    _check_tied(tensors, config, directory)


def check_shapes(
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    directory: Path,
    ignored: Collection[str] = (),
) -> None:
    """As `check_tensors`, with names and shapes given; `ignored` ones may be there or not."""
    extra = sorted(
        name
        for name in tensors.keys() - expected.keys() - set(ignored)
        # Old checkpoints carry it; it holds nothing a config does not already say.
        if not name.endswith("rotary_emb.inv_freq")
    )
    present = [(name, tensors[name], shape) for name, shape in expected.items() if name in tensors]
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unknown": extra,
        "of the wrong shape": [
            f"{name} {list(tensor.shape)}, expected {list(shape)}"
            for name, tensor, shape in present
            if tensor.shape != shape
        ],
        "of an unsupported dtype": [
            f"{name} {tensor.dtype}" for name, tensor, _ in present if not tensor.readable
        ],
    }
    found = [f"{kind}: {_listed(names)}" for kind, names in problems.items() if names]
    if found:
        raise ValueError(
            f"{directory} does not fit its config.json. Tensors {'; '.join(found)}. "
            "Fetch the model again, or use a checkpoint of a supported architecture"
        )


def _check_tied(tensors: Mapping[str, StoredTensor], config: ModelConfig, directory: Path) -> None:
    """Refuses a checkpoint that says tied but stores two different matrices."""
    if not (config.tied_embeddings and UNEMBEDDING_NAME in tensors):
        return
    first, second = tensors[EMBEDDING_NAME].open(), tensors[UNEMBEDDING_NAME].open()
    same = first.shape == second.shape and all(
        np.array_equal(first[row : row + _COMPARED_ROWS], second[row : row + _COMPARED_ROWS])
        for row in range(0, first.shape[0], _COMPARED_ROWS)
    )
    if not same:
        raise ValueError(
            f"{directory}: {UNEMBEDDING_NAME} differs from {EMBEDDING_NAME} although config.json "
            "says tie_word_embeddings; set it to false to use both"
        )


def _load_leaf(
    leaf: ParamLeaf,
    tensors: Mapping[str, StoredTensor],
    sharding: jax.sharding.Sharding,
    dtype: np.dtype,
) -> jax.Array:
    # Not `jax.make_array_from_callback`: it reads the shards of all devices before it moves one,
    # and reads a shard again for every device that holds a copy of it.
    devices_by_index: dict[tuple, list[jax.Device]] = {}
    indices = sharding.devices_indices_map(leaf.shape)
    for device in sharding.addressable_devices:
        axes = zip(indices[device], leaf.shape, strict=True)
        bounds = tuple(axis.indices(size) for axis, size in axes)
        devices_by_index.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in devices_by_index.items():
        values = _read_shard(leaf, tensors, tuple(slice(*bound) for bound in bounds), dtype)
        shards += [jax.device_put(values, device) for device in devices]
        jax.block_until_ready(shards)  # so that at most one shard waits in host memory
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _read_shard(
    leaf: ParamLeaf,
    tensors: Mapping[str, StoredTensor],
    index: tuple[slice, ...],
    dtype: np.dtype,
) -> np.ndarray:
    shape = tuple(len(range(axis.start, axis.stop)) for axis in index)
    values = np.empty(shape, dtype)
    if not leaf.stacked:
        np.copyto(values, tensors[leaf.tensor_names[0]].open()[index], casting="unsafe")
        return values
    for row, name in enumerate(leaf.tensor_names[index[0]]):
        tensor = tensors[name].open()
        oriented = tensor.T if leaf.transposed else tensor
        np.copyto(values[row], oriented[index[1:]], casting="unsafe")
    return values


def _listed(names: list[str]) -> str:
    shown = names[:_MAX_NAMES_LISTED]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")

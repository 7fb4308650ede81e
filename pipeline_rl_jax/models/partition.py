"""Which axis of which weight is split over which mesh axis.

Owns the logical axes of the parameter tree and their mapping to mesh axes, for the trainer mesh
(`data, fsdp, tensor`) and the generation mesh (`data, tensor`).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.transformer import abstract_params

LOGICAL_AXES: Mapping[str, tuple[str | None, ...]] = {
    "embedding": ("vocabulary", "width"),
    "unembedding": ("vocabulary", "width"),
    "final_norm": (None,),
    "attention_norm": (None, None),
    "query": (None, "width", "heads"),
    "key": (None, "width", "kv_heads"),
    "value": (None, "width", "kv_heads"),
    "output": (None, "heads", "width"),
    "query_bias": (None, "heads"),
    "key_bias": (None, "kv_heads"),
    "value_bias": (None, "kv_heads"),
    "query_norm": (None, None),
    "key_norm": (None, None),
    "mlp_norm": (None, None),
    "gate": (None, "width", "mlp"),
    "up": (None, "width", "mlp"),
    "down": (None, "mlp", "width"),
    "head_bias": (),
    "head_weight": (None,),
    "score": (None, None),
}
MESH_AXIS = {
    "vocabulary": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "width": "fsdp",
}


def param_shardings(config: ModelConfig, mesh: Mesh | AbstractMesh) -> dict:
    """The parameter tree of `abstract_params` with a `NamedSharding` at every leaf."""
    return tree_shardings(abstract_params(config), config, mesh)


def tree_shardings(tree: dict, config: ModelConfig, mesh: Mesh | AbstractMesh) -> dict:
    """Any tree whose leaves bear names of `LOGICAL_AXES`, with a `NamedSharding` at every leaf.

    An axis whose logical name maps to a mesh axis the mesh lacks is replicated (the generation mesh
    has no `fsdp`). KV heads that do not divide over `tensor` are replicated.
    """

    def sharding(path, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = LOGICAL_AXES[path[-1].key]
        spec = [mesh_axis(axis, config, mesh) for axis in axes]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def check_divisible(config: ModelConfig, mesh: Mesh | AbstractMesh, *, section: str) -> None:
    """Raises ValueError when a sharded width is no multiple of its mesh axis.

    `section` is the config path of the mesh's axis sizes, e.g. "meshes.trainer".
    """
    tensor, fsdp = mesh.shape.get("tensor", 1), mesh.shape.get("fsdp", 1)
    sizes = {
        "query heads": (config.num_query_heads, "tensor", tensor),
        "MLP width": (config.mlp_width, "tensor", tensor),
        "vocabulary": (config.vocabulary_size, "tensor", tensor),
        "width": (config.width, "fsdp", fsdp),
    }
    for name, (size, axis, parts) in sizes.items():
        if size % parts:
            divisors = [str(n) for n in range(1, parts + 1) if size % n == 0]
            raise ValueError(
                f"{section}.{axis} ({parts}) must divide the model's {name} ({size}); "
                f"use {' or '.join(divisors)}"
            )


def mesh_axis(axis: str | None, config: ModelConfig, mesh: Mesh | AbstractMesh) -> str | None:
    """The mesh axis a logical axis is split over, None where it is replicated."""
    name = MESH_AXIS.get(axis or "")
    if name is None or name not in mesh.shape:
        return None
    if axis == "kv_heads" and config.num_kv_heads % mesh.shape[name]:
        return None
    return name

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from pipeline_rl_jax.models.partition import LOGICAL_AXES, check_divisible, param_shardings
from pipeline_rl_jax.models.transformer import abstract_params


def _mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def test_trainer_mesh_splits_matrices_both_ways(tiny_config):
    shardings = param_shardings(tiny_config, _mesh(data=1, fsdp=2, tensor=2))
    layers = shardings["layers"]
    assert layers["query"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert layers["key"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert layers["output"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert layers["down"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert layers["query_bias"].spec == PartitionSpec(None, "tensor")
    assert layers["mlp_norm"].spec == PartitionSpec(None, None)
    assert shardings["embedding"].spec == PartitionSpec("tensor", "fsdp")


def test_generation_mesh_has_no_fsdp_axis(tiny_config):
    shardings = param_shardings(tiny_config, _mesh(data=2, tensor=2))
    assert shardings["layers"]["query"].spec == PartitionSpec(None, None, "tensor")
    assert shardings["unembedding"].spec == PartitionSpec("tensor", None)


def test_kv_heads_that_do_not_divide_are_replicated(tiny_config):
    shardings = param_shardings(tiny_config, _mesh(data=1, tensor=4))  # 2 KV heads
    assert shardings["layers"]["key"].spec == PartitionSpec(None, None, None)
    assert shardings["layers"]["value_bias"].spec == PartitionSpec(None, None)
    assert shardings["layers"]["query"].spec == PartitionSpec(None, None, "tensor")


def test_every_leaf_of_every_family_has_axes_of_its_rank(golden):
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(golden.config))
    for path, leaf in leaves:
        assert len(LOGICAL_AXES[path[-1].key]) == leaf.ndim


def test_indivisible_sizes_name_the_setting_and_the_way_out(tiny_config):
    with pytest.raises(ValueError, match=r"meshes.trainer.tensor \(3\) must divide .*use 1"):
        check_divisible(tiny_config, _mesh(data=1, fsdp=1, tensor=3), section="meshes.trainer")
    odd = dataclasses.replace(tiny_config, width=18)
    with pytest.raises(ValueError, match=r"meshes.trainer.fsdp \(4\).*width \(18\); use 1 or 2"):
        check_divisible(odd, _mesh(data=1, fsdp=4, tensor=1), section="meshes.trainer")
    check_divisible(tiny_config, _mesh(data=4, fsdp=2, tensor=2), section="meshes.trainer")

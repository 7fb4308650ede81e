from __future__ import annotations

import math

import jax

from pipeline_rl_jax.models.hf_tensors import param_leaves, tensor_shapes
from pipeline_rl_jax.models.safetensors_file import read_header
from pipeline_rl_jax.models.transformer import abstract_params


def test_names_and_shapes_are_those_transformers_saved(golden):
    stored = {}
    for path in golden.directory.glob("*.safetensors"):
        stored |= {name: tensor.shape for name, tensor in read_header(path).items()}
    assert tensor_shapes(golden.config) == stored


def test_leaves_are_those_of_the_tree_in_its_order(golden):
    tree = jax.tree_util.tree_leaves_with_path(abstract_params(golden.config))
    expected = [(tuple(key.key for key in path), leaf.shape) for path, leaf in tree]
    assert [(leaf.path, leaf.shape) for leaf in param_leaves(golden.config)] == expected


def test_a_matrix_is_stored_out_by_in(tiny_config):
    leaves = {leaf.path[-1]: leaf for leaf in param_leaves(tiny_config)}
    assert leaves["gate"].shape == (2, 16, 24)
    assert leaves["gate"].tensor_shape == (24, 16)
    assert leaves["gate"].tensor_names[1] == "model.layers.1.mlp.gate_proj.weight"
    assert not leaves["embedding"].transposed
    assert leaves["embedding"].tensor_shape == (40, 16)
    assert leaves["key_bias"].tensor_shape == (8,)


def test_elements_add_up(tiny_config):
    total = sum(math.prod(shape) for shape in tensor_shapes(tiny_config).values())
    assert total == tiny_config.num_parameters

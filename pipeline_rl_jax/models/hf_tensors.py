"""How the parameter tree is laid out in a Hugging Face checkpoint.

Owns the names, order and orientation of the tensors behind every leaf: there a layer is one tensor
and a matrix is `[out, in]`; here layers are stacked and a matrix is `[in, out]`. Reads and writes
nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.transformer import abstract_params

EMBEDDING_NAME = "model.embed_tokens.weight"
UNEMBEDDING_NAME = "lm_head.weight"
SCORE_NAME = "score.weight"
_TOP_NAMES: Mapping[str, str] = {
    "embedding": EMBEDDING_NAME,
    "unembedding": UNEMBEDDING_NAME,
    "final_norm": "model.norm.weight",
    "score": SCORE_NAME,  # of a reward model
}
_LAYER_NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamLeaf:
    """One leaf of the parameter tree and the checkpoint tensors it is made of."""

    path: tuple[str, ...]  # keys from the root of the nested dict
    shape: tuple[int, ...]  # of the leaf; the first axis counts layers when stacked
    stacked: bool
    tensor_names: tuple[str, ...]  # one per layer when stacked, else exactly one

    @property
    def transposed(self) -> bool:
        """True when a tensor is `[out, in]` where the leaf holds `[in, out]`."""
        return self.stacked and len(self.shape) == 3

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor in the checkpoint."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape


def param_leaves(config: ModelConfig) -> tuple[ParamLeaf, ...]:
    """Every leaf of `abstract_params(config)`, in the tree's order."""
    return tree_leaves(abstract_params(config))


def tree_leaves(tree: Mapping[str, Any]) -> tuple[ParamLeaf, ...]:
    """Every leaf of a parameter tree of ours, in its order; a leaf of `tree` has a `shape`."""
    leaves = []
    for key, value in tree.items():
        if key == "layers":
            leaves += [_layer_leaf(name, leaf.shape) for name, leaf in value.items()]
        else:
            names = (_TOP_NAMES[key],)
            leaves.append(
                ParamLeaf(path=(key,), shape=value.shape, stacked=False, tensor_names=names)
            )
    return tuple(leaves)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of `config` holds, leaf by leaf."""
    return leaf_shapes(param_leaves(config))


def leaf_shapes(leaves: Iterable[ParamLeaf]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor behind these leaves."""
    return {name: leaf.tensor_shape for leaf in leaves for name in leaf.tensor_names}


def _layer_leaf(name: str, shape: tuple[int, ...]) -> ParamLeaf:
    names = tuple(f"model.layers.{layer}.{_LAYER_NAMES[name]}" for layer in range(shape[0]))
    return ParamLeaf(path=("layers", name), shape=shape, stacked=True, tensor_names=names)

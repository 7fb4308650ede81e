"""A reward model: the transformer with one score per token, of which a sequence's last one counts.

Owns the module, its parameter tree and where a sequence ends. The head is transformers'
`*ForSequenceClassification` with one label: one row, no bias. There is no output embedding, so the
tree is that of a tied model and `score`. Files are `hf_reward.py`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.layers import last_states
from pipeline_rl_jax.models.partition import tree_shardings
from pipeline_rl_jax.models.transformer import Transformer

SCORE_DEVIATION = 0.02  # of a new head, as transformers draws it


class RewardModel(Transformer):
    """A transformer that also says how good a text is. Arguments as those of `Transformer`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        **options,
    ):
        super().__init__(body_config(config), rngs=rngs, param_dtype=param_dtype, **options)
        head = jax.random.normal(rngs.params(), (1, config.width), param_dtype)
        self.score = nnx.Param(SCORE_DEVIATION * head)

    def sequence_scores(
        self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"]
    ) -> Float[Array, " B"]:
        """One score per row, float32: of the token at `lengths − 1`; what follows is padding.

        The ids of padding play no part: a row may end with the id that pads. 0 for a length of 0.
        """
        index = jnp.arange(token_ids.shape[1])
        segment_ids = (index < lengths[:, None]).astype(jnp.int32)
        positions = jnp.broadcast_to(index, token_ids.shape)
        hidden = self(token_ids, positions=positions, segment_ids=segment_ids)
        scores = score_states(last_states(hidden, lengths), self.score[...])
        return jnp.where(lengths > 0, scores, 0.0)


def score_states(
    hidden: Float[Array, "*batch D"], score: Float[Array, "1 D"]
) -> Float[Array, " *batch"]:
    """h·w of final hidden states, in float32."""
    return hidden.astype(jnp.float32) @ score[0].astype(jnp.float32)


def body_config(config: ModelConfig) -> ModelConfig:
    """The config of the part that makes hidden states: no output embedding of its own."""
    return dataclasses.replace(config, tied_embeddings=True)


@functools.cache
def abstract_reward_params(config: ModelConfig, dtype: str = "float32") -> dict:
    """The parameter tree as a nested dict of `jax.ShapeDtypeStruct`, nothing allocated."""

    def build():
        model = RewardModel(config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(dtype))
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    return jax.eval_shape(build)


def reward_shardings(config: ModelConfig, mesh: Mesh | AbstractMesh) -> dict:
    """The parameter tree with a `NamedSharding` at every leaf."""
    return tree_shardings(abstract_reward_params(config), config, mesh)


def build_reward_model(config: ModelConfig, **options) -> nnx.GraphDef:
    """The model without its weights; `options` are those of `Transformer`.

    `nnx.merge(graph, params)` makes it callable.
    """
    graph, _ = nnx.split(nnx.eval_shape(lambda: RewardModel(config, rngs=nnx.Rngs(0), **options)))
    return graph

"""What is read off the hidden states of a chunk: a score, logprobs or values.

Owns the joint between chunks: the first token of a chunk is predicted by the last hidden state of
the chunk before. Each is equal to the same quantity of the whole sequence, for any way of cutting
it. Entry t describes token t; the shift itself is that of `token_logprobs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.incremental_forward import ChunkStates, RowChunks
from pipeline_rl_jax.models.layers import last_states
from pipeline_rl_jax.models.reward_model import score_states
from pipeline_rl_jax.models.token_logprobs import token_logprobs
from pipeline_rl_jax.models.value_head import VALUE_HEAD, token_values

# (params, states, chunks) to [n] (of the sequence so far) or [n, C] (of each token).
Readout = Callable[[Mapping[str, Any], ChunkStates, RowChunks], jax.Array]


def score_so_far(
    params: Mapping[str, Any], states: ChunkStates, chunks: RowChunks
) -> Float[Array, " n"]:
    """The reward model's score of the text up to the last token of each chunk, float32.

    A readout for the params of a `RewardModel`.
    """
    return score_states(last_states(states.hidden, chunks.lengths), params["score"])


def logprobs_readout(
    config: ModelConfig, *, temperature: float, logprob_chunk_tokens: int
) -> Readout:
    """log π(token_t) [n, C] of completion tokens, 0 elsewhere, as `token_logprobs` has them."""
    table = "embedding" if config.tied_embeddings else "unembedding"

    def read(params: Mapping[str, Any], states: ChunkStates, chunks: RowChunks) -> jax.Array:
        logprobs, _ = token_logprobs(
            _with_before(states),
            params[table],
            jnp.pad(chunks.token_ids, ((0, 0), (1, 0))),
            _wanted(chunks),
            temperature=temperature,
            chunk_tokens=logprob_chunk_tokens,
        )
        return logprobs[:, 1:]

    return read


def values_of_tokens(
    params: Mapping[str, Any], states: ChunkStates, chunks: RowChunks
) -> Float[Array, "n C"]:
    """Values of completion tokens, 0 elsewhere, as `value_head.token_values` has them."""
    return token_values(_with_before(states), params[VALUE_HEAD], _wanted(chunks))[:, 1:]


def _with_before(states: ChunkStates) -> Float[Array, "n E D"]:
    """[n, C + 1, D]: the state before the chunk, then the chunk's."""
    return jnp.concatenate([states.before[:, None], states.hidden], axis=1)


def _wanted(chunks: RowChunks) -> Bool[Array, "n E"]:
    """[n, C + 1], column 0 (the token before) False: real completion tokens that something
    predicts."""
    index: Int[Array, " C"] = jnp.arange(chunks.token_ids.shape[1])
    positions = chunks.starts[:, None] + index
    wanted = (index < chunks.lengths[:, None]) & (positions >= chunks.prompt_lengths[:, None])
    return jnp.pad(wanted & (positions > 0), ((0, 0), (1, 0)))

"""Log-probabilities of given tokens: the only place where the shift by one happens.

Owns the chunked computation from hidden states: `[B, chunk, V]` logits exist for one chunk of
tokens at a time, in the backward pass too. Entry `t` of a result describes token `t`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_logprobs(
    hidden: Float[Array, "B T D"],
    output_embedding: Float[Array, "V D"],
    token_ids: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`log softmax(h_{t-1}·Eᵀ/temperature)[token_t]` and the entropy of that distribution (nats).

    Both are float32 and 0 where `mask` is False; column 0 is never predicted and is always 0.
    Masked-in tokens are moved to the front of their row first, so that chunks without any are
    skipped: a row that is mostly prompt costs little. `chunk_tokens` counts tokens over all rows.
    """
    num_rows, num_tokens = token_ids.shape
    mask = mask.at[:, 0].set(False)
    order = jnp.argsort(~mask, axis=1, stable=True)  # [B, T], masked-in tokens first
    columns = max(1, min(num_tokens, chunk_tokens // num_rows))
    num_chunks = -(-num_tokens // columns)
    padded = jnp.pad(order, ((0, 0), (0, num_chunks * columns - num_tokens)))
    in_use = jnp.arange(num_chunks * columns)[None] < jnp.sum(mask, axis=1, keepdims=True)
    chunks = (_to_chunks(padded, columns), _to_chunks(in_use, columns))

    @jax.checkpoint
    def scored(columns_of_row: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        previous = jnp.maximum(columns_of_row - 1, 0)  # the shift: token t is predicted at t - 1
        states = jnp.take_along_axis(hidden, previous[:, :, None], axis=1)
        targets = jnp.take_along_axis(token_ids, columns_of_row, axis=1)
        logprobs, entropy = _score(states, output_embedding, targets, temperature)
        return jnp.where(valid, logprobs, 0.0), jnp.where(valid, entropy, 0.0)

    def skipped(columns_of_row: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros(valid.shape, jnp.float32)
        return zeros, zeros

    def step(_, chunk):
        return None, jax.lax.cond(jnp.any(chunk[1]), scored, skipped, *chunk)

    _, (logprobs, entropy) = jax.lax.scan(step, None, chunks)
    inverse = jnp.argsort(order, axis=1)

    def in_place(chunked: jax.Array) -> jax.Array:
        return jnp.take_along_axis(_from_chunks(chunked)[:, :num_tokens], inverse, axis=1)

    return in_place(logprobs), in_place(entropy)


def before_each_token(at_tokens: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Entry t is what was computed at token t − 1, before token t was known; column 0 is 0."""
    return jnp.pad(at_tokens, ((0, 0), (1, 0)))[:, :-1]


def _score(
    states: jax.Array, output_embedding: jax.Array, targets: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    table = output_embedding.astype(states.dtype)
    scores = jnp.einsum("btd,vd->btv", states, table, preferred_element_type=jnp.float32)
    scores = scores / temperature
    log_total = jax.nn.logsumexp(scores, axis=-1)
    # A masked sum instead of a gather: it stays local when V is sharded over the tensor axis.
    is_target = jnp.arange(scores.shape[-1]) == targets[..., None]
    chosen = jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    expected = jnp.sum(jnp.exp(scores - log_total[..., None]) * scores, axis=-1)
    return chosen - log_total, log_total - expected


def _to_chunks(x: jax.Array, columns: int) -> jax.Array:
    return x.reshape(x.shape[0], -1, columns).swapaxes(0, 1)  # [chunks, B, columns]


def _from_chunks(x: jax.Array) -> jax.Array:
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)

"""Drawing the next token: temperature, top-k, top-p, and the logprob of what was drawn.

Owns the choice of one token per slot. One uniform number per (seed, prompt, sample, position)
selects a token by inverting the cumulative distribution, so that neither slot, nor batch, nor
timing changes what is drawn, and no noise over the whole vocabulary is made.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128  # columns summed together in the first pass over the vocabulary


def uniforms(
    seed: int,
    prompt_ids: Int[Array, " B"],
    sample_indices: Int[Array, " B"],
    positions: Int[Array, " B"],
) -> Float[Array, " B"]:
    """One number in [0, 1) per slot, a function of the four arguments only."""

    def draw(prompt_id: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        for part in (prompt_id, sample_index, position):
            key = jax.random.fold_in(key, part)
        return jax.random.uniform(key)

    return jax.vmap(draw)(prompt_ids, sample_indices, positions)


def sample(
    logits: Float[Array, "B V"],
    uniform: Float[Array, " B"],
    temperatures: Float[Array, " B"],
    *,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws token ids and returns their float32 logprobs.

    Scores are `logits / temperature`, cut to the `top_k` largest (0 = all), then to the smallest
    set of the most probable whose mass reaches `top_p` (1 = all). Ties at a cut are kept. The
    logprob is of that renormalised distribution. Temperature 0 takes the largest logit; its logprob
    is given at temperature 1, since that of a certain event says nothing.
    """
    greedy = temperatures <= 0.0
    scores = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperatures)[:, None]
    if top_k > 0 or top_p < 1.0:
        scores = jnp.where(greedy[:, None], scores, _truncate(scores, top_k=top_k, top_p=top_p))
    vocabulary = scores.shape[-1]
    scores = jnp.pad(scores, ((0, 0), (0, -vocabulary % BLOCK)), constant_values=-jnp.inf)
    blocks = scores.reshape(scores.shape[0], -1, BLOCK)
    largest = jnp.max(scores, axis=-1)
    block_mass = jnp.sum(jnp.exp(blocks - largest[:, None, None]), axis=-1)  # [B, V/BLOCK]
    drawn, total = _invert(blocks, block_mass, largest, uniform)
    best = jnp.argmax(scores, axis=-1)
    token_ids = jnp.where(greedy, best, drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(scores, token_ids[:, None], axis=-1)[:, 0]
    return token_ids, chosen - largest - jnp.log(total)


def _invert(
    blocks: jax.Array, block_mass: jax.Array, largest: jax.Array, uniform: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First the block, then the column within it, where the cumulative mass passes the target."""
    cumulative = jnp.cumsum(block_mass, axis=-1)
    total = cumulative[:, -1]
    target = uniform * total
    block = _first_above(cumulative, block_mass, target)
    before = jnp.take_along_axis(cumulative - block_mass, block[:, None], axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    mass = jnp.exp(inside - largest[:, None])
    column = _first_above(jnp.cumsum(mass, axis=-1), mass, target - before[:, 0])
    return block * BLOCK + column, total


def _first_above(cumulative: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """Index of the first positive mass whose cumulative sum exceeds the target.

    Rounding may put the target past the end: then the last entry that has any mass is taken, never
    one of probability zero.
    """
    hit = (cumulative > target[:, None]) & (mass > 0)
    last = mass.shape[-1] - 1 - jnp.argmax(jnp.flip(mass > 0, axis=-1), axis=-1)
    return jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last)


def _truncate(scores: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    """Scores with everything outside the top-k and the nucleus at -inf."""
    descending = -jnp.sort(-scores, axis=-1)
    if 0 < top_k < scores.shape[-1]:
        scores = jnp.where(scores < descending[:, top_k - 1 : top_k], -jnp.inf, scores)
        kept = jnp.arange(descending.shape[-1]) < top_k
        descending = jnp.where(kept, descending, -jnp.inf)
    if top_p < 1.0:
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        in_nucleus = before < top_p  # the first always is
        smallest = jnp.min(jnp.where(in_nucleus, descending, jnp.inf), axis=-1, keepdims=True)
        scores = jnp.where(scores < smallest, -jnp.inf, scores)
    return scores

"""How per-token loss terms become one number.

Owns the weight of every token in the loss. The weights are taken over the whole optimizer batch
at once; after that the loss is a plain sum Σ weight · term, which no split into micro-batches,
no packing and no placement on devices can change (only regroup its additions).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Aggregation = Literal["sequence_sum", "token_mean", "sequence_mean", "constant"]


def loss_weights(
    loss_mask: Bool[Array, "R T"],
    sequence_index: Int[Array, "R T"],
    *,
    num_sequences: Int[Array, ""] | int,
    mode: Aggregation,
    constant: float = 0.0,
) -> Float[Array, "R T"]:
    """Weight of each token, float32, 0 outside `loss_mask`; call it with the WHOLE batch.

    With B = `num_sequences`, n_i trainable tokens of rollout i and N of all:
    `sequence_sum` 1/B (PipelineRL, eq. 5), `token_mean` 1/N (DAPO), `sequence_mean` 1/(n_i·B)
    (GRPO), `constant` 1/(B·constant), constant in tokens and > 0 (Dr. GRPO, arXiv 2503.20783).
    B counts rollouts without a trainable token too; with no trainable token at all every weight
    is 0. `sequence_index` lies in 0..R·T−1 wherever `loss_mask` is True.
    """
    mask = loss_mask.astype(jnp.float32)
    batch_size = jnp.maximum(jnp.asarray(num_sequences, jnp.float32), 1.0)
    if mode == "sequence_sum":
        return mask / batch_size
    if mode == "token_mean":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    if mode == "constant":
        return mask / (batch_size * constant)
    return mask / (jnp.maximum(_sequence_lengths(loss_mask, sequence_index), 1.0) * batch_size)


def _sequence_lengths(
    loss_mask: Bool[Array, "R T"], sequence_index: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """Trainable tokens of the rollout each trainable token belongs to."""
    buckets = jnp.where(loss_mask, sequence_index, loss_mask.size).ravel()
    counts = jax.ops.segment_sum(
        loss_mask.ravel().astype(jnp.float32), buckets, num_segments=loss_mask.size + 1
    )
    return counts[buckets].reshape(loss_mask.shape)

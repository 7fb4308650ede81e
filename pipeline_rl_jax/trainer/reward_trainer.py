"""Fits a reward model to preference pairs.

Owns the batches of pairs, the jitted step and the accuracy on pairs. Plain AdamW on padded rows; a
batch is one forward pass, there are no micro-batches. Texts, files and the command are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from pipeline_rl_jax.algorithms.bradley_terry import bradley_terry_loss, num_right
from pipeline_rl_jax.algorithms.packing import padded_size
from pipeline_rl_jax.data.preferences import TokenPair
from pipeline_rl_jax.meshes import row_sharding
from pipeline_rl_jax.trainer.optimizer import decayed

_SHORTEST_TOKENS = 32


class PairBatch(NamedTuple):
    """P pairs, the chosen text first; a pair of lengths 0 is padding."""

    token_ids: np.ndarray | jax.Array  # [2, P, T] int32
    lengths: np.ndarray | jax.Array  # [2, P] int32


class PairMetrics(NamedTuple):
    """Of one batch, before the update made from it; scalars on the device."""

    loss: jax.Array  # nats
    num_right: jax.Array  # a tie is half a pair
    margin: jax.Array  # mean of r_chosen − r_rejected
    gradient_norm: jax.Array


def pad_pairs(pairs: Sequence[TokenPair], *, num_pairs: int) -> PairBatch:
    """One batch, as wide as its longest text, rounded up to a power of two."""
    width = padded_size(max(pair.num_tokens for pair in pairs), _SHORTEST_TOKENS)
    token_ids = np.zeros((2, num_pairs, width), np.int32)
    lengths = np.zeros((2, num_pairs), np.int32)
    for column, pair in enumerate(pairs):
        for side, text in enumerate(pair):
            token_ids[side, column, : text.size] = text
            lengths[side, column] = text.size
    return PairBatch(token_ids, lengths)


def shuffled_batches(
    pairs: Sequence[TokenPair], *, num_pairs: int, seed: int
) -> Iterator[PairBatch]:
    """Full batches without end. Each epoch has an order of its own, by (seed, epoch); a batch may
    hold the end of one and the beginning of the next."""
    waiting: list[int] = []
    epoch = 0
    while True:
        while len(waiting) < num_pairs:
            waiting += np.random.default_rng([seed, epoch]).permutation(len(pairs)).tolist()
            epoch += 1
        yield pad_pairs([pairs[i] for i in waiting[:num_pairs]], num_pairs=num_pairs)
        del waiting[:num_pairs]


def build_reward_optimizer(
    *, learning_rate: float, warmup_steps: int, weight_decay: float, max_gradient_norm: float
) -> optax.GradientTransformation:
    """AdamW after a clip by global norm; a linear warm-up to a constant rate."""

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        share = (jnp.asarray(count, jnp.float32) + 1.0) / max(1, warmup_steps)
        return learning_rate * jnp.minimum(1.0, share)

    return optax.chain(
        optax.clip_by_global_norm(max_gradient_norm),
        optax.adamw(schedule, weight_decay=weight_decay, mask=decayed),
    )


class RewardTrainer:
    """Weights and optimizer state on a mesh with the axes of the trainer's.

    `graph` is of `build_reward_model`; `params` (float32) are taken over: they are donated.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        params: Mapping[str, Any],
        *,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
    ) -> None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
        self.params = params
        self._optimizer_state = jax.jit(optimizer.init)(params)
        self._columns = row_sharding(mesh, row_axis=1)

        def loss(params: Mapping[str, Any], batch: PairBatch) -> tuple[jax.Array, PairMetrics]:
            chosen, rejected, valid = _pair_scores(graph, params, batch)
            value = bradley_terry_loss(chosen, rejected, valid=valid)
            right = num_right(chosen, rejected, valid=valid)
            margin = jnp.sum(chosen - rejected) / jnp.maximum(1, jnp.sum(valid))
            return value, PairMetrics(value, right, margin, jnp.float32(0))

        def step(params: Any, state: Any, batch: PairBatch) -> tuple[Any, Any, PairMetrics]:
            gradients, metrics = jax.grad(loss, has_aux=True)(params, batch)
            metrics = metrics._replace(gradient_norm=optax.tree.norm(gradients))
            updates, state = optimizer.update(gradients, state, params)
            params = jax.lax.with_sharding_constraint(
                optax.apply_updates(params, updates), shardings
            )
            return params, state, metrics

        def right(params: Mapping[str, Any], batch: PairBatch) -> jax.Array:
            chosen, rejected, valid = _pair_scores(graph, params, batch)
            return num_right(chosen, rejected, valid=valid)

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._right = jax.jit(right)

    def step(self, batch: PairBatch) -> PairMetrics:
        """One update; does not wait for it."""
        self.params, self._optimizer_state, metrics = self._step(
            self.params, self._optimizer_state, self._on_devices(batch)
        )
        return metrics

    def accuracy(self, pairs: Sequence[TokenPair], *, num_pairs: int) -> float:
        """Share of pairs whose chosen text has the higher score, `num_pairs` at a time."""
        parts = []
        for start in range(0, len(pairs), num_pairs):
            batch = pad_pairs(pairs[start : start + num_pairs], num_pairs=num_pairs)
            parts.append(self._right(self.params, self._on_devices(batch)))
        return float(sum(jax.device_get(parts))) / len(pairs)

    def _on_devices(self, batch: PairBatch) -> PairBatch:
        return jax.device_put(batch, self._columns)


def _pair_scores(
    graph: nnx.GraphDef, params: Mapping[str, Any], batch: PairBatch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores of the chosen texts and of the others, [P] each, and which pairs are real."""
    token_ids, lengths = map(jnp.asarray, batch)
    flat = token_ids.reshape(-1, token_ids.shape[-1])
    scores = nnx.merge(graph, params).sequence_scores(flat, lengths.reshape(-1))
    chosen, rejected = scores.reshape(lengths.shape)
    return chosen, rejected, lengths[0] > 0

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from pipeline_rl_jax.data.preferences import TokenPair
from pipeline_rl_jax.models.reward_model import RewardModel, build_reward_model, reward_shardings
from pipeline_rl_jax.trainer.reward_trainer import (
    RewardTrainer,
    build_reward_optimizer,
    pad_pairs,
    shuffled_batches,
)
from tests.fakes.tiny_training import TINY

GOOD_ID = 63


def _pairs(count: int, *, seed: int) -> list[TokenPair]:
    """Random texts of 4 to 12 tokens; the chosen one has the good token somewhere."""
    generator = np.random.default_rng(seed)

    def text(good: bool) -> np.ndarray:
        ids = generator.integers(0, GOOD_ID, generator.integers(4, 13)).astype(np.int32)
        if good:
            ids[generator.integers(ids.size)] = GOOD_ID
        return ids

    return [TokenPair(text(True), text(False)) for _ in range(count)]


def _trainer(num_devices: int = 1, *, learning_rate: float = 3e-3) -> RewardTrainer:
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(1, -1, 1), ("data", "fsdp", "tensor"))
    params = nnx.to_pure_dict(nnx.state(RewardModel(TINY, rngs=nnx.Rngs(0)), nnx.Param))
    optimizer = build_reward_optimizer(
        learning_rate=learning_rate, warmup_steps=2, weight_decay=0.01, max_gradient_norm=1.0
    )
    return RewardTrainer(
        build_reward_model(TINY),
        jax.device_put(params, reward_shardings(TINY, mesh)),
        optimizer=optimizer,
        mesh=mesh,
    )


def test_it_learns_what_the_pairs_have_in_common():
    trainer = _trainer()
    held_out = _pairs(64, seed=1)
    before = trainer.accuracy(held_out, num_pairs=16)
    assert 0.2 < before < 0.8
    batches = shuffled_batches(_pairs(256, seed=0), num_pairs=16, seed=0)
    losses = [float(trainer.step(batch).loss) for batch in itertools.islice(batches, 40)]
    assert losses[0] == pytest.approx(np.log(2), abs=0.05)
    assert losses[-1] < 0.3
    assert trainer.accuracy(held_out, num_pairs=16) > 0.9


def test_devices_share_a_batch_without_changing_the_step():
    batch = pad_pairs(_pairs(4, seed=0), num_pairs=4)
    results = []
    for num_devices in (1, 2):
        # Adam's first steps are signs of gradients: at a tiny rate rounding stays rounding.
        trainer = _trainer(num_devices, learning_rate=1e-6)
        metrics = trainer.step(batch)
        results.append((float(metrics.loss), float(metrics.gradient_norm), float(metrics.margin)))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_padded_pairs_change_nothing():
    pairs = _pairs(3, seed=0)
    first, second = _trainer(), _trainer()
    exact = first.step(pad_pairs(pairs, num_pairs=3))
    padded = second.step(pad_pairs(pairs, num_pairs=4))
    np.testing.assert_allclose(exact, padded, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), first.params, second.params
    )
    assert second.accuracy(pairs, num_pairs=2) == second.accuracy(pairs, num_pairs=4)


def test_batches_are_full_and_every_epoch_has_every_pair():
    pairs = [TokenPair(np.full(4, i, np.int32), np.full(4, i, np.int32)) for i in range(5)]
    batches = list(itertools.islice(shuffled_batches(pairs, num_pairs=2, seed=0), 5))
    order = [int(batch.token_ids[0, column, 0]) for batch in batches for column in range(2)]
    assert sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:]
    again = itertools.islice(shuffled_batches(pairs, num_pairs=2, seed=0), 5)
    assert [int(b.token_ids[0, c, 0]) for b in again for c in range(2)] == order


def test_rows_are_as_wide_as_their_longest_text_needs():
    long = TokenPair(np.ones(33, np.int32), np.ones(2, np.int32))
    batch = pad_pairs([long], num_pairs=2)
    assert batch.token_ids.shape == (2, 2, 64)
    np.testing.assert_array_equal(batch.lengths, [[33, 0], [2, 0]])

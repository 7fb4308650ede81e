"""The metric oracle: four rollouts of mixed versions, every metric worked out by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.metrics import combine, empty_sums, finish, token_sums
from pipeline_rl_jax.algorithms.objective import policy_loss
from pipeline_rl_jax.algorithms.packing import TrainingSequence, pack
from tests.fakes.rollouts import make_completion, make_prompt, rows_of
from tests.fakes.settings import make_algorithm_settings

# Weights of 10 optimizer steps are in training.
#   rollout  A    ratios           versions
#   0       +1    2, 1             8, 9
#   1       −1    1/2, 4           10, 7
#   2        0    1                10
#   3       +1    8, 1, 1/2        9, 9, 10
RATIOS = [[2.0, 1.0], [0.5, 4.0], [1.0], [8.0, 1.0, 0.5]]
VERSIONS = [[8, 9], [10, 7], [10], [9, 9, 10]]
ADVANTAGES = [1.0, -1.0, 0.0, 1.0]
TRAINED_VERSION = 10
LOG2 = np.log(2.0)

BY_HAND = {
    "batch/loss_tokens": 8,
    "importance/ratio_mean": 18.0 / 8,  # 2 + 1 + 1/2 + 4 + 1 + 8 + 1 + 1/2
    "importance/ratio_max": 8,
    "importance/ess_raw_share": 18.0**2 / (8 * 87.5),  # 4 + 1 + 1/4 + 16 + 1 + 64 + 1 + 1/4
    "importance/ess_clamped_share": 12.0**2 / (8 * 25.5),  # 4 and 8 become 3
    "importance/clip_share": 2 / 8,
    "importance/clip_positive_share": 1 / 5,
    "importance/clip_negative_share": 1 / 2,
    "lag/mean_steps": (2 + 1 + 0 + 3 + 0 + 1 + 1 + 0) / 8,
    "lag/max_steps": 3,
    "lag/zero_share": 3 / 8,
    "policy/logprob_gap_at_lag_zero_nats": 2 * LOG2 / 3,  # ratios 1/2, 1, 1/2
    "policy/kl_to_behaviour_nats": -(1 - 1 + 2 + 3 - 1) * LOG2 / 8,  # −mean log ratio
    "policy/kl_to_behaviour_k3_nats": (18.0 - 8) / 8 - 4 * LOG2 / 8,  # mean of r − 1 − log r
    "policy/surprisal_nats": 3.0 - 4 * LOG2 / 8,
    "policy/entropy_nats": (0 + 1 + 2 + 3 + 4 + 5 + 6 + 7) / 8,
}


def make_batch(tokens_per_row, *, order=(0, 1, 2, 3), rows_per_micro_batch=1):
    sequences = [
        TrainingSequence(
            completion=make_completion(
                make_prompt(i), range(len(RATIOS[i])), logprobs=-3.0, versions=VERSIONS[i]
            ),
            advantages=ADVANTAGES[i],
            returns=0.0,
        )
        for i in order
    ]
    return pack(sequences, tokens_per_row=tokens_per_row, rows_per_micro_batch=rows_per_micro_batch)


def token_values(batch, values, order, *, elsewhere):
    """`values` of each rollout laid out as its tokens are in the batch."""
    array = np.full(batch.token_ids.shape, elsewhere, np.float32)
    for index, rollout in enumerate(order):
        array[batch.loss_mask & (batch.sequence_index == index)] = values[rollout]
    return array


@functools.partial(jax.jit, static_argnums=0)
def sums_of(settings, batch, current, entropies):
    _, statistics = policy_loss(
        settings, current_logprobs=current, batch=batch, entropies=entropies
    )
    return token_sums(statistics, batch, trained_version=TRAINED_VERSION)


def metrics_of(batch, *, order=(0, 1, 2, 3), num_parts=1, **changes):
    settings = make_algorithm_settings(**{"importance_clamp": 3.0, **changes})
    logprobs = [-3.0 + np.log(np.array(r)) for r in RATIOS]
    current = token_values(batch, logprobs, order, elsewhere=np.nan)
    numbered = [[0, 1], [2, 3], [4], [5, 6, 7]]
    entropies = token_values(batch, numbered, order, elsewhere=np.nan)
    size = current.shape[0] // num_parts
    total = empty_sums(with_entropy=True)
    for start in range(0, current.shape[0], size):
        rows = slice(start, start + size)
        part = rows_of(batch, start, start + size)
        total = jit_combine(total, sums_of(settings, part, current[rows], entropies[rows]))
    return jax.device_get(jit_finish(total))


jit_finish = jax.jit(finish)
jit_combine = jax.jit(combine)


def test_every_metric_by_hand():
    metrics = metrics_of(make_batch(16))
    assert set(metrics) == set(BY_HAND)
    for name, expected in BY_HAND.items():
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("tokens_per_row", "order", "num_parts"),
    [(5, (0, 1, 2, 3), 4), (5, (3, 1, 0, 2), 1), (8, (2, 3, 0, 1), 2)],
)
def test_metrics_depend_on_neither_packing_nor_order_nor_split(tokens_per_row, order, num_parts):
    batch = make_batch(tokens_per_row, order=order, rows_per_micro_batch=1)
    metrics = metrics_of(batch, order=order, num_parts=num_parts)
    for name, expected in BY_HAND.items():
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-5, err_msg=name)


def test_clip_shares_follow_the_sign_of_the_advantage():
    # Bounds 0.8 and 1.2. A > 0 clips above: 2 and 8 of five tokens. A < 0 clips below: 1/2 of two.
    metrics = metrics_of(make_batch(16), loss="ppo")
    np.testing.assert_allclose(metrics["importance/clip_positive_share"], 2 / 5)
    np.testing.assert_allclose(metrics["importance/clip_negative_share"], 1 / 2)
    np.testing.assert_allclose(metrics["importance/clip_share"], 3 / 8)
    # 1.2 + 1 + 0.8 + 1.2 + 1 + 1.2 + 1 + 0.8 and its squares
    squares = 3 * 1.2**2 + 3 + 2 * 0.8**2
    np.testing.assert_allclose(
        metrics["importance/ess_clamped_share"], 8.2**2 / (8 * squares), rtol=1e-5
    )


def test_no_token_at_all_gives_zeros_not_nan():
    metrics = jax.device_get(jit_finish(empty_sums()))
    assert "policy/entropy_nats" not in metrics
    assert all(value == 0.0 for value in metrics.values())


def test_reference_and_value_measures_by_hand():
    returns, values = np.array([1.0, 0.0, 0.5, 1.0]), [[1.0, 0.5], [0.0, 0.5], [0.5], [1, 1, 0.0]]
    batch, order = make_batch(8, rows_per_micro_batch=1), (0, 1, 2, 3)
    current = token_values(batch, [np.log(r) - 3.0 for r in RATIOS], order, elsewhere=np.nan)
    reference = token_values(batch, [[-3.0] * len(r) for r in RATIOS], order, elsewhere=np.nan)
    laid_out = token_values(batch, values, order, elsewhere=np.nan)
    batch = dataclasses.replace(
        batch,
        reference_logprobs=reference,
        returns=token_values(
            batch, [[r] * len(v) for r, v in zip(returns, values, strict=True)], order, elsewhere=0
        ),
    )
    settings = make_algorithm_settings(kl_coefficient=0.1, baseline="value")

    @jax.jit
    def both_rows_apart(current, laid_out):
        total = empty_sums(with_reference=True, with_values=True)
        for row in range(current.shape[0]):
            part, rows = rows_of(batch, row, row + 1), slice(row, row + 1)
            _, statistics = policy_loss(
                settings, current_logprobs=current[rows], batch=part, values=laid_out[rows]
            )
            total = combine(total, token_sums(statistics, part, trained_version=10))
        return finish(total)

    metrics = both_rows_apart(current, laid_out)
    # The reference stands where the sampler stood in `BY_HAND`, but on the other side.
    inverse = [1 / 2, 1, 2, 1 / 4, 1, 1 / 8, 1, 2]
    np.testing.assert_allclose(metrics["policy/kl_to_reference_nats"], 4 * LOG2 / 8, rtol=1e-5)
    np.testing.assert_allclose(
        metrics["policy/kl_to_reference_k3_nats"], sum(inverse) / 8 - 1 + 4 * LOG2 / 8, rtol=1e-5
    )
    # R: 1 1 0 0 .5 1 1 1, R - v: 0 .5 0 -.5 0 0 0 1
    all_returns = np.array([1, 1, 0, 0, 0.5, 1, 1, 1])
    errors = np.array([0, 0.5, 0, -0.5, 0, 0, 0, 1])
    np.testing.assert_allclose(metrics["value/loss"], (errors**2).mean() / 2, rtol=1e-5)
    expected = 1 - errors.var() / all_returns.var()
    np.testing.assert_allclose(metrics["value/explained_variance"], expected, rtol=1e-4)


def test_combine_keeps_what_has_no_entropy():
    ones = jax.tree.map(lambda _: jnp.float32(1.0), empty_sums())
    twice = combine(ones, ones)
    assert (twice.tokens, twice.ratio_max, twice.lag_max, twice.entropy) == (2.0, 1.0, 1.0, None)

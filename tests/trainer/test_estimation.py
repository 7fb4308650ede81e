"""Two completions in one row, every number worked out by hand."""

import dataclasses
import math

import numpy as np
import pytest

from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.trainer.estimation import Estimator, ValueRows, build_kl_control
from tests.fakes.settings import make_algorithm_settings
from tests.fakes.tiny_training import tiny_meshes

MESH = tiny_meshes().trainer
#          prompt, three tokens, prompt, two tokens, padding
SEGMENTS = [[1, 1, 1, 1, 2, 2, 2, 0]]
MASK = np.array([[0, 1, 1, 1, 0, 1, 1, 0]], bool)


def on_tokens(first: list[float], second: list[float]) -> np.ndarray:
    row = np.zeros((1, 8), np.float32)
    row[0, 1:4], row[0, 5:7] = first, second
    return row


def batch_of(**changes) -> PackedBatch:
    zeros = np.zeros((1, 8), np.float32)
    batch = PackedBatch(
        token_ids=np.zeros((1, 8), np.int32),
        segment_ids=np.array(SEGMENTS, np.int32),
        positions=np.array([[0, 1, 2, 3, 0, 1, 2, 0]], np.int32),
        loss_mask=MASK,
        sequence_index=np.array([[0, 0, 0, 0, 1, 1, 1, -1]], np.int32),
        behaviour_logprobs=on_tokens([-1.0, -2.0, -1.5], [-1.0, -0.5]),
        advantages=zeros,
        returns=on_tokens([1.0] * 3, [0.5] * 2),  # the reward at every token
        reference_logprobs=on_tokens([-1.5, -1.0, -1.5], [-1.0, -2.5]),
        weight_versions=np.where(MASK, 0, -1).astype(np.int32),
        num_sequences=np.int32(2),
        num_rows=np.int32(1),
    )
    return dataclasses.replace(batch, **changes)


VALUES = ValueRows(
    before=on_tokens([0.2, 0.4, 0.6], [0.1, 0.3]), after=on_tokens([9.0, 9.0, 0.7], [9.0, 0.8])
)


def estimate(batch: PackedBatch | None = None, **settings):
    algorithm = make_algorithm_settings(baseline="gae", **settings)
    return Estimator(algorithm, mesh=MESH).from_values(batch or batch_of(), VALUES)


def test_gae_by_hand():
    batch, measures = estimate(gae_gamma=0.5, gae_lambda=0.5)
    # First: deltas 0.5*0.4-0.2 = 0, 0.5*0.6-0.4 = -0.1, 1-0.6 = 0.4; A = 0.4, -0.1+0.1 = 0, 0
    # Second: deltas 0.5*0.3-0.1 = 0.05, 0.5-0.3 = 0.2; A = 0.2, 0.05+0.05 = 0.1
    expected = on_tokens([0.0, 0.0, 0.4], [0.1, 0.2])
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-6)
    np.testing.assert_allclose(batch.returns, expected + VALUES.before, atol=1e-6)
    np.testing.assert_array_equal(batch.values, VALUES.before)
    assert measures["value/mean"] == pytest.approx((0.2 + 0.4 + 0.6 + 0.1 + 0.3) / 5)
    assert measures["advantage/std"] == pytest.approx(np.std([0, 0, 0.4, 0.1, 0.2]))
    assert "kl_control/coefficient" not in measures


def test_whitening_is_over_all_tokens_of_the_batch():
    plain, _ = estimate()
    white, _ = estimate(batch_normalise=True)
    tokens = plain.advantages[MASK]
    np.testing.assert_allclose(
        white.advantages[MASK], (tokens - tokens.mean()) / tokens.std(), atol=1e-5
    )
    np.testing.assert_array_equal(white.advantages[~MASK], 0.0)
    np.testing.assert_array_equal(white.returns, plain.returns)  # targets are not whitened


def test_a_cut_completion_goes_on_with_the_value_after_its_last_token():
    truncated = np.where(np.array([[0, 1, 1, 1, 0, 0, 0, 0]], bool), MASK, False)
    ended, _ = estimate(gae_gamma=0.9, gae_lambda=0.8)
    cut, _ = estimate(batch_of(truncated=truncated), gae_gamma=0.9, gae_lambda=0.8)
    gained = 0.9 * 0.7  # gamma * V after the last token, handed back by gamma * lambda
    expected = on_tokens([gained * 0.72**2, gained * 0.72, gained], [0, 0])
    np.testing.assert_allclose(cut.advantages - ended.advantages, expected, atol=1e-6)


def test_the_kl_of_a_token_is_taken_off_its_own_reward():
    changes = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    batch, measures = estimate(gae_gamma=1.0, gae_lambda=1.0, **changes)
    # k1 = behaviour - reference: 0.5, -1, 0 and 0, 2; rewards to go minus values
    rewards = [[-0.05, 0.1, 1.0], [0.0, 0.5 - 0.2]]
    expected = on_tokens(
        [sum(rewards[0]) - 0.2, sum(rewards[0][1:]) - 0.4, 1.0 - 0.6], [0.3 - 0.1, 0.3 - 0.3]
    )
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-6)
    assert measures["kl_control/completion_nats"] == pytest.approx((-0.5 + 2.0) / 2)
    assert measures["reward/kl_penalty_mean"] == pytest.approx(0.1 * 0.75)
    assert measures["kl_control/coefficient"] == pytest.approx(0.1)


def test_adaptive_control_follows_the_divergence_and_comes_back_from_a_snapshot():
    algorithm = make_algorithm_settings(
        baseline="gae",
        kl_coefficient=0.1,
        kl_in="reward",
        kl_control="adaptive",
        kl_target_nats=0.5,
        kl_horizon_rollouts=20,
    )
    estimator = Estimator(algorithm, mesh=MESH)
    used = [
        estimator.from_values(batch_of(), VALUES)[1]["kl_control/coefficient"] for _ in range(2)
    ]
    # 0.75 nats are half more than the target: the error is bounded by 0.2, two of 20 rollouts
    assert used == pytest.approx([0.1, 0.1 * (1 + 0.2 * 2 / 20)])
    other = Estimator(algorithm, mesh=MESH)
    other.restore(estimator.snapshot())
    _, measures = other.from_values(batch_of(), VALUES)
    assert measures["kl_control/coefficient"] == pytest.approx(0.1 * 1.02**2)


def test_without_a_kl_in_the_reward_there_is_no_coefficient():
    for changes in ({}, {"kl_coefficient": 0.3, "kl_in": "loss"}):
        assert build_kl_control(make_algorithm_settings(**changes)).coefficient == 0.0


def test_pairs_weigh_by_how_wrong_the_policy_is_about_them():
    algorithm = make_algorithm_settings(loss="dpo", dpo_beta=0.5)
    pair = on_tokens([1.0] * 3, [-1.0] * 2)
    logprobs = on_tokens([-1.0, -1.0, -1.0], [-1.0, -2.0])
    batch, measures = Estimator(algorithm, mesh=MESH).from_pairs(
        batch_of(advantages=pair), logprobs
    )
    # log ratios: -3 + 4 = 1 and -3 + 3.5 = 0.5; margin 0.5 * 0.5 = 0.25
    weight = 0.5 / (1 + math.exp(0.25))
    expected = 2 * on_tokens([weight] * 3, [-weight] * 2)  # times the batch's two rollouts
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-5)
    assert measures["dpo/margin_nats"] == pytest.approx(0.25)
    assert measures["dpo/loss_nats"] == pytest.approx(math.log(1 + math.exp(-0.25)))
    assert measures["dpo/accuracy_share"] == 1.0
    assert measures["dpo/pairs"] == 1.0


def test_a_pair_that_lost_its_other_half_does_not_count():
    algorithm = make_algorithm_settings(loss="dpo")
    pair = on_tokens([1.0] * 3, [0.0] * 2)
    batch, measures = Estimator(algorithm, mesh=MESH).from_pairs(
        batch_of(advantages=pair), np.zeros((1, 8), np.float32)
    )
    np.testing.assert_array_equal(batch.advantages, 0.0)
    assert measures["dpo/pairs"] == 0.0

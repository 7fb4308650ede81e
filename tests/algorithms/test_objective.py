"""The chosen loss over a whole batch: published formulas, and one gradient however it is split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.advantages import compute_advantages
from pipeline_rl_jax.algorithms.aggregation import loss_weights
from pipeline_rl_jax.algorithms.kl import kl_estimates
from pipeline_rl_jax.algorithms.objective import learned_baseline, policy_loss
from pipeline_rl_jax.algorithms.packing import TrainingSequence, pack
from pipeline_rl_jax.algorithms.values import value_loss
from tests.fakes.rollouts import (
    VOCABULARY_SIZE,
    bigram_logprobs,
    make_completion,
    make_group,
    make_prompt,
    rows_of,
)
from tests.fakes.settings import make_algorithm_settings

TABLE, REFERENCE = (
    np.random.default_rng(0).normal(size=(2, VOCABULARY_SIZE, VOCABULARY_SIZE)).astype(np.float32)
)


@functools.partial(jax.jit, static_argnums=0)
def weights_of(settings, batch):
    return loss_weights(
        batch.loss_mask,
        batch.sequence_index,
        num_sequences=batch.num_sequences,
        mode=settings.aggregation,
        constant=settings.aggregation_constant,
    )


# --- The published objectives, written out over rollouts ---

LOGPROBS = [np.array([-1.0, -2.0]), np.array([-0.5, -3.0, -1.5])]  # current
BEHAVIOUR = [np.array([-1.5, -2.0]), np.array([-0.4, -1.0, -1.4])]
REWARDS = np.array([1.0, 0.0])
DIFFERENCE = REWARDS - 0.5
NORMALISED = DIFFERENCE / 0.5


def clipped_terms(advantages, *, low, high):
    """−min(r·A, clip(r)·A) of each token of each rollout."""
    terms = []
    for current, behaviour, advantage in zip(LOGPROBS, BEHAVIOUR, advantages, strict=True):
        ratios = np.exp(current - behaviour)
        bounded = np.clip(ratios, 1 - low, 1 + high)
        terms.append(-np.minimum(ratios * advantage, bounded * advantage))
    return terms


def expected_pipelinerl():
    terms = [
        -np.minimum(1.2, np.exp(c - b)) * a * c
        for c, b, a in zip(LOGPROBS, BEHAVIOUR, DIFFERENCE, strict=True)
    ]
    return sum(t.sum() for t in terms) / 2


def expected_grpo():
    return np.mean([t.mean() for t in clipped_terms(NORMALISED, low=0.2, high=0.2)])


def expected_dr_grpo():
    return sum(t.sum() for t in clipped_terms(DIFFERENCE, low=0.2, high=0.2)) / (2 * 8)


def expected_dapo():
    return np.concatenate(clipped_terms(NORMALISED, low=0.2, high=0.28)).mean()


def expected_gspo():
    ratios = [np.exp(np.mean(c - b)) for c, b in zip(LOGPROBS, BEHAVIOUR, strict=True)]
    bounded = np.clip(ratios, 1 - 0.1, 1 + 0.2)
    return np.mean(-np.minimum(ratios * NORMALISED, bounded * NORMALISED))


PPO = {"loss": "ppo", "normalise_std": True}
PUBLISHED = {
    "pipelinerl": (expected_pipelinerl, {"importance_clamp": 1.2}),
    "grpo": (expected_grpo, PPO | {"aggregation": "sequence_mean"}),
    "dr_grpo": (
        expected_dr_grpo,
        {"loss": "ppo", "aggregation": "constant", "aggregation_constant": 8.0},
    ),
    "dapo": (expected_dapo, PPO | {"aggregation": "token_mean", "clip_high": 0.28}),
    "gspo": (
        expected_gspo,
        PPO | {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.1},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_objectives(name):
    expected, changes = PUBLISHED[name]
    settings = make_algorithm_settings(**changes)
    advantages = compute_advantages(
        settings, rewards=REWARDS, group_index=np.zeros(2, int), valid=np.ones(2, bool)
    )
    completions = [
        make_completion(make_prompt(), range(len(b)), sample_index=i, logprobs=b)
        for i, b in enumerate(BEHAVIOUR)
    ]
    sequences = [
        TrainingSequence(completion=c, advantages=float(a), returns=0.0)
        for c, a in zip(completions, advantages, strict=True)
    ]
    batch = pack(sequences, tokens_per_row=12, rows_per_micro_batch=1)
    current = np.full((1, 12), np.nan, np.float32)  # what nobody may read
    current[0, np.flatnonzero(batch.loss_mask)] = np.concatenate([LOGPROBS[1], LOGPROBS[0]])

    @jax.jit
    def loss_of(current, batch):
        loss, _ = policy_loss(settings, current_logprobs=current, batch=batch)
        return jnp.sum(weights_of(settings, batch) * loss)

    np.testing.assert_allclose(loss_of(current, batch), expected(), rtol=1e-5)


# --- One gradient, packed or not, split or not ---


def make_sequences():
    """Eleven rollouts of unequal length, one of them empty, away from the policy in training."""
    groups = [
        make_group(0, [1.0, 0.0, 0.0], num_tokens=[3, 5, 2]),
        make_group(1, [1.0, 1.0], num_tokens=[6, 1]),
        make_group(2, [0.0, 0.3, 1.0, 0.2, 0.9, 0.1], num_tokens=[4, 0, 2, 7, 3, 5]),
    ]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [
        TrainingSequence(
            completion=rollout.completion, advantages=0.7 - index % 3, returns=rollout.reward
        )
        for index, rollout in enumerate(rollouts)
    ]


def loss_terms(parameters, batch):
    """Every kind of per-token term there is: the policy losses, then value and reference KL."""
    table, value_table = parameters
    mask = jnp.asarray(batch.loss_mask)
    current, reference = bigram_logprobs(table, batch), bigram_logprobs(REFERENCE, batch)
    batch = dataclasses.replace(batch, reference_logprobs=reference)
    probabilities = jax.nn.softmax(table)
    entropies = -jnp.sum(probabilities * jnp.log(probabilities), axis=1)[batch.token_ids]
    values = value_table[batch.token_ids]
    rest = {"current_logprobs": current, "entropies": entropies, "values": values}
    policy = [
        policy_loss(
            settings,
            batch=learned_baseline(batch, values) if settings.learns_values else batch,
            **rest,
        ).loss
        for settings in COMBINATIONS
    ]
    value = value_loss(values, jnp.asarray(batch.returns), mask)
    kl = kl_estimates(current, reference, mask, estimator="k3")
    return jnp.stack([*policy, value, kl])  # [term, R, T]


def one_rollout_a_row(sequences, tokens_per_row):
    """The same batch without packing: every rollout in a row of its own."""
    rows = [pack([s], tokens_per_row=tokens_per_row, rows_per_micro_batch=1) for s in sequences]
    batch = jax.tree.map(lambda *x: np.concatenate(x) if np.ndim(x[0]) else x[0], *rows)
    index = np.arange(len(rows), dtype=np.int32)[:, None]
    return dataclasses.replace(
        batch,
        sequence_index=np.where(batch.sequence_index < 0, -1, index),
        num_sequences=np.int32(len(rows)),
    )


COMBINATIONS = [
    make_algorithm_settings(entropy_coefficient=0.01, **changes)
    for changes in (
        {"loss": "is_reinforce", "aggregation": "sequence_sum", "importance_clamp": 0.4},
        {"loss": "ppo", "aggregation": "token_mean"},
        {"loss": "cispo", "aggregation": "constant", "aggregation_constant": 7.0},
        {"loss": "gspo", "aggregation": "sequence_mean"},
        {"loss": "ppo", "aggregation": "token_mean", "kl_coefficient": 0.3, "kl_estimator": "k2"},
        {"baseline": "value", "group_size": 1, "value_coefficient": 0.5},
        {"loss": "gspo", "is_correction": "masked", "is_lowest": 0.2, "is_highest": 0.6},
        {"loss": "ppo", "ratio_anchor": "current", "is_correction": "truncated", "is_highest": 0.2},
    )
]


@jax.jit
@jax.jacrev
def gradients_of(parameters, batch, weights):
    """Gradient of every weighted term over some rows, [term, ...] for each parameter."""
    return jnp.sum(weights * loss_terms(parameters, batch), axis=(1, 2))


def accumulated_gradients(batch, num_parts):
    parameters = (TABLE, np.linspace(-1.0, 1.0, VOCABULARY_SIZE, dtype=np.float32))
    kinds = [*COMBINATIONS, COMBINATIONS[0], COMBINATIONS[1]]
    weights = np.stack([weights_of(settings, batch) for settings in kinds])
    size = batch.token_ids.shape[0] // num_parts
    parts = [
        gradients_of(parameters, rows_of(batch, start, start + size), weights[:, start:][:, :size])
        for start in range(0, batch.token_ids.shape[0], size)
    ]
    return [np.sum(leaves, axis=0) for leaves in zip(*map(jax.device_get, parts), strict=True)]


def test_one_gradient_whatever_the_packing_and_the_split():
    packed = pack(make_sequences(), tokens_per_row=18, rows_per_micro_batch=1)
    assert packed.token_ids.shape == (4, 18)
    assert packed.segment_ids.max() > 2
    unpacked = one_rollout_a_row(make_sequences(), 18)
    assert unpacked.token_ids.shape == (11, 18)
    by_table, by_value_table = accumulated_gradients(packed, 1)
    for batch, num_parts in ((packed, 2), (packed, 4), (unpacked, 11)):
        other = accumulated_gradients(batch, num_parts)
        np.testing.assert_allclose(other[0], by_table, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(other[1], by_value_table, rtol=1e-5, atol=1e-6)
    # Every term has a gradient where it should, and no two have the same.
    value_term = len(COMBINATIONS)
    assert np.abs(by_value_table[value_term]).max() > 1e-3
    learned = next(i for i, settings in enumerate(COMBINATIONS) if settings.learns_values)
    assert np.abs(by_value_table[learned]).max() > 1e-3
    others = [i for i in range(len(by_value_table)) if i not in (value_term, learned)]
    assert not by_value_table[others].any()
    flat = np.delete(by_table, value_term, axis=0).reshape(value_term + 1, -1)
    assert np.linalg.matrix_rank(flat / np.abs(flat).max(axis=1, keepdims=True)) == value_term + 1


def test_entropy_is_reported_and_its_bonus_needs_it():
    batch = pack(make_sequences()[:1], tokens_per_row=5, rows_per_micro_batch=1)
    current, entropies = np.full((2, 1, 5), [[[-1.0]], [[2.0]]], np.float32)
    plain, bonus = make_algorithm_settings(), make_algorithm_settings(entropy_coefficient=0.5)

    @jax.jit
    def both(batch, current, entropies):
        rest = {"current_logprobs": current, "batch": batch, "entropies": entropies}
        return policy_loss(plain, **rest), policy_loss(bonus, **rest)

    (loss, statistics), (with_bonus, _) = jax.device_get(both(batch, current, entropies))
    np.testing.assert_array_equal(statistics["entropy"], [[0, 0, 2, 2, 2]])
    np.testing.assert_allclose(with_bonus - loss, [[0, 0, -1, -1, -1]], rtol=1e-6)
    with pytest.raises(ValueError, match="entropy_coefficient"):
        jax.jit(lambda: policy_loss(bonus, current_logprobs=jnp.asarray(current), batch=batch))()


# --- What is added beside the policy loss ---

ONE_ROW = pack(make_sequences()[:1], tokens_per_row=6, rows_per_micro_batch=1)  # 2 + 3 tokens
CURRENT = np.array([[np.nan, np.nan, -1.0, -2.0, -0.5, np.nan]], np.float32)
REFERENCE_ROW = np.array([[np.nan, np.nan, -1.5, -2.0, -0.1, np.nan]], np.float32)


@functools.partial(jax.jit, static_argnums=0)
def terms_and_gradient(settings, current):
    """Loss terms, statistics and gradient by the current logprobs, of `ONE_ROW`."""
    batch = dataclasses.replace(ONE_ROW, reference_logprobs=REFERENCE_ROW)

    def total(current):
        result = policy_loss(settings, current_logprobs=current, batch=batch)
        return result.loss.sum(), result

    gradient, result = jax.grad(total, has_aux=True)(current)
    return result.loss, result.statistics, gradient


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_kl_in_the_loss_by_hand(estimator):
    settings = make_algorithm_settings(kl_coefficient=0.3, kl_estimator=estimator)
    plain, _, plain_gradient = terms_and_gradient(make_algorithm_settings(), CURRENT)
    loss, statistics, gradient = terms_and_gradient(settings, CURRENT)
    d = np.array([-0.5, 0.0, 0.4])  # log ref - log current
    zeros = [0.0, 0.0]
    k3 = np.exp(d) - d - 1
    estimates, slopes = {"k1": (-d, d**0), "k2": (d**2 / 2, -d), "k3": (k3, 1 - np.exp(d))}[
        estimator
    ]
    np.testing.assert_allclose((loss - plain)[0], [*zeros, *(0.3 * estimates), 0.0], atol=1e-6)
    # The pull is the estimator's own derivative at every token, the masked ones left alone.
    np.testing.assert_allclose(
        (gradient - plain_gradient)[0], [*zeros, *(0.3 * slopes), 0.0], atol=1e-6
    )
    np.testing.assert_allclose(statistics["reference_k1"][0, 2:5], -d, atol=1e-6)
    np.testing.assert_allclose(statistics["reference_k3"][0, 2:5], k3, atol=1e-6)


def test_reference_kl_in_the_reward_is_measured_but_no_term_of_the_loss():
    settings = make_algorithm_settings(kl_coefficient=0.3, kl_in="reward")
    plain, plain_statistics, plain_gradient = terms_and_gradient(make_algorithm_settings(), CURRENT)
    loss, statistics, gradient = terms_and_gradient(settings, CURRENT)
    np.testing.assert_array_equal(loss, plain)
    np.testing.assert_array_equal(gradient, plain_gradient)
    assert statistics.keys() - plain_statistics.keys() == {"reference_k1", "reference_k3"}


def test_a_learned_baseline_by_hand():
    """A = R - v, detached; the value loss is added, its gradient goes to the values only."""
    settings = make_algorithm_settings(baseline="value", value_coefficient=0.2, group_size=1)
    values = np.array([[9.0, 9.0, 0.25, 0.5, 2.0, 9.0]], np.float32)
    current = np.where(ONE_ROW.loss_mask, ONE_ROW.behaviour_logprobs, 0.0)  # every ratio is 1

    def total(current, values):
        batch = learned_baseline(ONE_ROW, values)
        result = policy_loss(settings, current_logprobs=current, batch=batch, values=values)
        return result.loss.sum(), result.statistics

    gradients, statistics = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(current, values)
    # The reward is 1 at all three tokens: A = 0.75, 0.5, -1.
    np.testing.assert_allclose(gradients[0], [[0, 0, -0.75, -0.5, 1.0, 0]], atol=1e-6)
    np.testing.assert_allclose(gradients[1], [[0, 0, -0.15, -0.1, 0.2, 0]], atol=1e-6)
    np.testing.assert_array_equal(statistics["values"], [[0, 0, 0.25, 0.5, 2.0, 0]])
    with pytest.raises(ValueError, match=r"algorithm.baseline \(value\)"):
        jax.jit(
            lambda: policy_loss(settings, current_logprobs=jnp.asarray(CURRENT), batch=ONE_ROW)
        )()


@pytest.mark.parametrize("kept", [[], [3]], ids=["no token", "one token"])
def test_added_terms_with_no_and_one_valid_token(kept):
    """What nobody may read is NaN; the one token has all of the gradient, no token has none."""
    settings = make_algorithm_settings(
        kl_coefficient=0.3, baseline="value", entropy_coefficient=0.1, group_size=1
    )
    mask = np.isin(np.arange(6), kept)[None]
    only = np.where(mask, CURRENT, np.nan)
    batch = dataclasses.replace(
        ONE_ROW,
        loss_mask=mask,
        reference_logprobs=np.where(mask, REFERENCE_ROW, np.nan),
        returns=np.where(mask, 1.0, np.nan),
    )

    def total(current, values):
        with_baseline = learned_baseline(batch, values)
        loss, statistics = policy_loss(
            settings,
            current_logprobs=current,
            batch=with_baseline,
            entropies=-values,
            values=values,
        )
        return loss.sum(), (loss, statistics)

    gradients, (loss, statistics) = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(
        only, only
    )
    for array in (loss, *gradients, *statistics.values()):
        assert np.isfinite(array).all()
        assert not np.asarray(array)[~mask].any()
    assert np.count_nonzero(gradients[0]) == np.count_nonzero(gradients[1]) == len(kept)

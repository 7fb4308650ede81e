import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.dpo import (
    choose_pairs,
    dpo_advantages,
    dpo_loss,
    dpo_metrics,
    sequence_log_ratios,
)

BETA = 0.5
MASK = np.array([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 1]], bool)
SEQUENCES = np.array([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 3, 3]], np.int32)
PAIRS = {
    "winners": np.array([0, 3, 0], np.int32),
    "losers": np.array([2, 1, 0], np.int32),
    "valid": np.array([True, True, False]),
}


def log_ratios(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    return sequence_log_ratios(
        logprobs, reference, mask=jnp.asarray(MASK), sequence_index=jnp.asarray(SEQUENCES),
        num_sequences=4,
    )  # fmt: skip


def test_pairs_are_best_against_worst_and_ties_are_counted():
    rewards = np.array([0.2, 0.9, 0.9, 0.1, 1.0, 1.0, 0.5, 3.0, np.nan])
    groups = np.array([0, 0, 0, 0, 1, 1, 2, 3, 3])
    valid = np.array([True] * 8 + [False])
    pairs = choose_pairs(rewards, groups, valid=valid, max_pairs=4)
    np.testing.assert_array_equal(pairs.winners, [1, 0, 0, 0])  # of equals the first
    np.testing.assert_array_equal(pairs.losers, [3, 0, 0, 0])
    np.testing.assert_array_equal(pairs.valid, [True, False, False, False])
    assert (pairs.num_ties, pairs.num_single) == (1, 2)


def test_rewards_that_differ_by_rounding_are_a_tie():
    rewards, groups = np.array([0.1 + 0.2, 0.3]), np.array([0, 0])
    valid = np.array([True, True])
    assert choose_pairs(rewards, groups, valid=valid, max_pairs=1).num_ties == 0
    close = choose_pairs(rewards, groups, valid=valid, max_pairs=1, reward_floor=1e-6)
    assert close.num_ties == 1
    assert not close.valid.any()


def test_too_little_room_for_pairs_is_refused():
    with pytest.raises(ValueError, match=r"max_pairs \(0\)"):
        choose_pairs(
            np.array([0.0, 1.0]), np.array([0, 0]), valid=np.array([True, True]), max_pairs=0
        )


def test_log_ratios_sum_over_the_trainable_tokens_of_a_rollout():
    logprobs = jnp.where(MASK, jnp.arange(12.0).reshape(2, 6), jnp.nan)
    ratios = log_ratios(logprobs, jnp.where(MASK, 1.0, jnp.nan))
    np.testing.assert_allclose(ratios, [1 + 2 - 2, 4 - 1, 7 + 8 + 9 - 3, 11 - 1])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_loss_and_metrics_by_hand(transform):
    ratios = jnp.array([1.0, 0.5, -1.0, -1.5])
    pairs = transform(lambda x: dpo_loss(x, **PAIRS, beta=BETA))(ratios)
    # m = ½·(1 + 1) and ½·(−1.5 − 0.5)
    np.testing.assert_allclose(pairs.margins, [1.0, -1.0, 0.0])
    np.testing.assert_allclose(
        pairs.loss, [np.log(1 + np.exp(-1)), np.log(1 + np.exp(1)), 0.0], rtol=1e-6
    )
    metrics = dpo_metrics(pairs, PAIRS["valid"])
    assert metrics["dpo/accuracy_share"] == 0.5
    assert metrics["dpo/margin_nats"] == 0.0
    assert metrics["dpo/pairs"] == 2.0
    assert metrics["dpo/loss_nats"] == pytest.approx(np.mean(pairs.loss[:2]))


def test_at_the_reference_the_loss_is_log_two():
    pairs = dpo_loss(jnp.zeros(4), **PAIRS, beta=BETA)
    np.testing.assert_allclose(pairs.loss, [np.log(2), np.log(2), 0.0], rtol=1e-6)


def test_without_a_pair_there_is_neither_loss_nor_gradient():
    nothing = {**PAIRS, "valid": np.zeros(3, bool)}
    ratios = jnp.array([1.0, 0.5, -1.0, -1.5])
    assert (
        float(
            dpo_metrics(dpo_loss(ratios, **nothing, beta=BETA), nothing["valid"])["dpo/loss_nats"]
        )
        == 0
    )
    np.testing.assert_array_equal(dpo_advantages(ratios, **nothing, beta=BETA), np.zeros(4))


def _table_loss(table: jax.Array, token_ids: np.ndarray, reference: jax.Array) -> jax.Array:
    logprobs = _token_logprobs(table, token_ids)
    pairs = dpo_loss(log_ratios(logprobs, reference), **PAIRS, beta=BETA)
    return dpo_metrics(pairs, PAIRS["valid"])["dpo/loss_nats"]


def _token_logprobs(table: jax.Array, token_ids: np.ndarray) -> jax.Array:
    logprobs = jax.nn.log_softmax(table)[token_ids[:, :-1], token_ids[:, 1:]]
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def _random_problem() -> tuple[jax.Array, np.ndarray, jax.Array]:
    random = np.random.default_rng(3)
    token_ids = random.integers(0, 5, (2, 6))
    table = jnp.asarray(random.normal(size=(5, 5)), jnp.float32)
    reference = _token_logprobs(jnp.asarray(random.normal(size=(5, 5)), jnp.float32), token_ids)
    return table, token_ids, reference


def test_gradient_by_finite_differences():
    table, token_ids, reference = _random_problem()
    gradient = jax.grad(_table_loss)(table, token_ids, reference)
    step = 1e-2
    for direction in jax.random.normal(jax.random.key(0), (4, 5, 5)):
        ahead = _table_loss(table + step * direction, token_ids, reference)
        behind = _table_loss(table - step * direction, token_ids, reference)
        assert jnp.vdot(gradient, direction) == pytest.approx(
            float(ahead - behind) / (2 * step), abs=2e-3
        )
    assert np.abs(gradient).max() > 0.02


def test_advantages_give_the_gradient_of_the_loss_whatever_the_split():
    table, token_ids, reference = _random_problem()
    advantages = dpo_advantages(
        log_ratios(_token_logprobs(table, token_ids), reference), **PAIRS, beta=BETA
    )

    def surrogate(table, row):
        logprobs = _token_logprobs(table, token_ids[row : row + 1])
        weights = jnp.where(MASK, advantages[SEQUENCES], 0.0)[row : row + 1]
        return -jnp.sum(weights * logprobs)

    split = sum(jax.grad(surrogate)(table, row) for row in range(2))
    whole = jax.grad(_table_loss)(table, token_ids, reference)
    np.testing.assert_allclose(split, whole, atol=1e-6)

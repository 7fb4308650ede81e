import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.gae import Discounts, ValueTokens, estimate_advantages
from pipeline_rl_jax.algorithms.masked import masked_whiten

NAN = jnp.nan
# A prompt token, a completion with a masked token inside, a second completion, padding.
TOKENS = ValueTokens(
    rewards=jnp.array([[NAN, 1.0, 100.0, 2.0, 9.0, 0.5, NAN]]),
    values=jnp.array([[NAN, 1.0, NAN, 3.0, 7.0, 2.0, NAN]]),
    mask=jnp.array([[False, True, False, True, False, True, False]]),
    segment_ids=jnp.array([[1, 1, 1, 1, 2, 2, 0]]),
)
HALVES = Discounts(gamma=0.5, lam=0.5)
estimate = jax.jit(estimate_advantages)


def loop(tokens: ValueTokens, discounts: Discounts, bootstrap=None) -> np.ndarray:
    """The definition, token by token."""
    rewards, values, mask, segments = (np.asarray(field) for field in tokens)
    advantages = np.zeros(rewards.shape)
    for row in range(rewards.shape[0]):
        for segment in np.unique(segments[row]):
            columns = np.flatnonzero(mask[row] & (segments[row] == segment))
            following = 0.0
            for place in range(len(columns) - 1, -1, -1):
                t = columns[place]
                if place + 1 < len(columns):
                    next_value = values[row, columns[place + 1]]
                else:
                    next_value = 0.0 if bootstrap is None else bootstrap[row, t]
                delta = rewards[row, t] + discounts.gamma * next_value - values[row, t]
                following = delta + discounts.gamma * discounts.lam * following
                advantages[row, t] = following
    return advantages


def random_tokens(seed: int, *, rows: int = 3, width: int = 17) -> ValueTokens:
    random = np.random.default_rng(seed)
    return ValueTokens(
        rewards=jnp.asarray(random.normal(size=(rows, width)), jnp.float32),
        values=jnp.asarray(random.normal(size=(rows, width)), jnp.float32),
        mask=jnp.asarray(random.random((rows, width)) < 0.7),
        segment_ids=jnp.asarray(np.sort(random.integers(1, 4, (rows, width)), axis=1)),
    )


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_by_hand(transform):
    # c2: 2 − 3 = −1. c1: 1 + ½·3 − 1 + ¼·(−1) = 1.25. The other: 0.5 − 2.
    estimates = transform(estimate_advantages)(TOKENS, HALVES)
    np.testing.assert_allclose(estimates.advantages, [[0, 1.25, 0, -1, 0, -1.5, 0]])
    np.testing.assert_allclose(estimates.returns, [[0, 2.25, 0, 2, 0, 0.5, 0]])


def test_a_cut_completion_goes_on_from_the_given_value():
    bootstrap = jnp.array([[NAN, 50.0, NAN, 4.0, NAN, 0.0, NAN]])
    # c2: 2 + ½·4 − 3 = 1. c1: 1.5 + ¼·1. What stands at c1 is not asked for.
    estimates = estimate(TOKENS, HALVES, bootstrap=bootstrap)
    np.testing.assert_allclose(estimates.advantages, [[0, 1.75, 0, 1, 0, -1.5, 0]])


def test_without_discount_it_is_reward_to_go_minus_value():
    estimates = estimate(TOKENS, Discounts(gamma=1.0, lam=1.0))
    np.testing.assert_allclose(estimates.returns, [[0, 3, 0, 2, 0, 0.5, 0]])
    np.testing.assert_allclose(estimates.advantages, [[0, 2, 0, -1, 0, -1.5, 0]])


def test_with_lambda_zero_it_is_the_error_of_one_step():
    estimates = estimate(TOKENS, Discounts(gamma=1.0, lam=0.0))
    np.testing.assert_allclose(estimates.advantages, [[0, 3, 0, -1, 0, -1.5, 0]])


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_loop_over_tokens(seed):
    tokens = random_tokens(seed)
    discounts = Discounts(gamma=0.97, lam=0.9)
    bootstrap = jnp.asarray(np.random.default_rng(seed + 100).normal(size=(3, 17)), jnp.float32)
    for beyond in (None, bootstrap):
        estimates = estimate(tokens, discounts, bootstrap=beyond)
        np.testing.assert_allclose(
            estimates.advantages, loop(tokens, discounts, beyond), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("num_valid", [0, 1])
def test_with_few_valid_tokens(num_valid):
    mask = jnp.zeros_like(TOKENS.mask).at[0, 3].set(bool(num_valid))
    estimates = estimate(TOKENS._replace(mask=mask), HALVES)
    expected = np.zeros((1, 7))
    expected[0, 3] = -1.0 * num_valid  # 2 − 3
    np.testing.assert_allclose(estimates.advantages, expected)
    whitened = masked_whiten(estimates.advantages, mask, std_floor=1e-6)
    np.testing.assert_array_equal(whitened, np.zeros((1, 7)))


def test_whitened_by_hand():
    estimates = estimate(TOKENS, Discounts(gamma=1.0, lam=0.0))
    whitened = masked_whiten(estimates.advantages, TOKENS.mask, std_floor=1e-6)
    # 3, −1, −1.5: mean 1/6, variance 146/36
    expected = (np.array([3.0, -1.0, -1.5]) - 1 / 6) / np.sqrt(146 / 36)
    np.testing.assert_allclose(np.asarray(whitened)[np.asarray(TOKENS.mask)], expected, rtol=1e-5)


def test_no_split_and_no_packing_changes_an_advantage():
    tokens, discounts = random_tokens(7), Discounts(gamma=0.97, lam=0.9)
    whole = estimate(tokens, discounts).advantages
    for row in range(3):
        part = jax.tree.map(lambda x, row=row: x[row : row + 1], tokens)
        np.testing.assert_array_equal(estimate(part, discounts).advantages, whole[row : row + 1])
    for segment in range(1, 4):  # each segment alone in its row
        alone = tokens._replace(mask=tokens.mask & (tokens.segment_ids == segment))
        np.testing.assert_allclose(
            estimate(alone, discounts).advantages,
            jnp.where(tokens.segment_ids == segment, whole, 0.0),
            atol=1e-6,
        )


def test_no_gradient_reaches_the_values():
    def total(values):
        estimates = estimate(TOKENS._replace(values=values), HALVES)
        return estimates.advantages.sum() + estimates.returns.sum()

    assert not np.asarray(jax.grad(total)(TOKENS.values)).any()

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.importance import (
    MAX_LOG_RATIO,
    effective_sample_share,
    importance_ratios,
    log_ratios,
    masked_weights,
    sequence_ratios,
    truncated_weights,
)

MASK = jnp.array([[False, True, True, True]])
BEHAVIOUR = jnp.log(jnp.array([[jnp.nan, 0.5, 0.1, 0.2]]))
CURRENT = jnp.log(jnp.array([[jnp.nan, 0.25, 0.8, 0.2]]))


def token_level(current, behaviour, mask):
    ratios = importance_ratios(current, behaviour, mask)
    return {
        "logs": log_ratios(current, behaviour, mask),
        "ratios": ratios,
        "truncated": truncated_weights(ratios, 5.0),
        "masked": masked_weights(ratios, lowest=0.6, highest=5.0),
    }


jit_token_level = jax.jit(token_level)


@pytest.mark.parametrize("function", [token_level, jit_token_level], ids=["eager", "jit"])
def test_token_ratios_and_weights_by_hand(function):
    actual = function(CURRENT, BEHAVIOUR, MASK)
    expected = {
        "logs": [[0, np.log(0.5), np.log(8), 0]],
        "ratios": [[0, 0.5, 8, 1]],
        "truncated": [[0, 0.5, 5, 1]],  # bounded from above only
        "masked": [[0, 0, 0, 1]],  # left out instead of bounded
    }
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-5, err_msg=name)


def test_the_ratio_carries_a_gradient_and_the_weights_none():
    jacobian = jax.jit(jax.jacrev(lambda c: jax.tree.map(jnp.sum, token_level(c, BEHAVIOUR, MASK))))
    gradients = jax.device_get(jacobian(CURRENT))
    np.testing.assert_allclose(gradients["ratios"], [[0, 0.5, 8, 1]], rtol=1e-5)
    assert not gradients["truncated"].any()
    assert not gradients["masked"].any()


def test_extreme_ratios_stay_finite():
    ratios = np.asarray(
        jit_token_level(CURRENT, np.full((1, 4), -200.0, np.float32), MASK)["ratios"]
    )
    np.testing.assert_allclose(ratios[0, 1:], np.exp(MAX_LOG_RATIO), rtol=1e-5)
    assert np.isfinite(np.sum(ratios**2))


def test_sequence_ratio_is_the_geometric_mean_of_each_completion():
    # Two completions in one row, (0.5, 8) and (2, 2, 1/4); their geometric means are 2 and 1.
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    mask = jnp.array([[0, 1, 1, 0, 1, 1, 1, 0]], bool)
    current = np.log(np.array([[np.nan, 0.5, 8, np.nan, 2, 2, 0.25, np.nan]], np.float32))

    def ratio_sum(current):
        ratios = sequence_ratios(
            current, jnp.zeros_like(current), mask=mask, segment_ids=segment_ids
        )
        return ratios.sum(), ratios

    gradient, ratios = jax.jit(jax.grad(ratio_sum, has_aux=True))(current)
    np.testing.assert_allclose(ratios, [[0, 2, 2, 0, 1, 1, 1, 0]], rtol=1e-6)
    # d s / d log π_t = s/n at each of n tokens, and s is counted n times in the sum.
    np.testing.assert_allclose(gradient, [[0, 2, 2, 0, 1, 1, 1, 0]], rtol=1e-6)


def test_effective_sample_share_by_hand():
    share = jax.jit(effective_sample_share)
    for weights, expected in [
        ([2.0, 2.0, 2.0, 2.0], 1.0),
        ([0.0, 0.0, 3.0, 0.0], 0.25),
        ([1.0, 3.0], 16.0 / 20.0),
        ([], 0.0),
    ]:
        weights = np.array(weights, np.float32)
        actual = share(weights.sum(), np.square(weights).sum(), np.float32(weights.size))
        np.testing.assert_allclose(actual, expected, rtol=1e-6)

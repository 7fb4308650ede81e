import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.masked import (
    masked_mean,
    masked_sum,
    masked_variance,
    masked_whiten,
    zero_masked,
)

VALUES = np.array([[1.0, np.nan, 3.0], [8.0, np.inf, -np.inf]], np.float32)
MASK = np.array([[True, False, True], [True, False, False]])
NONE = np.zeros_like(MASK)
ONE = np.array([[False, False, True], [False, False, False]])


def all_statistics(values, mask):
    return {
        "sum": masked_sum(values, mask),
        "mean": masked_mean(values, mask),
        "variance": masked_variance(values, mask),
        "whitened": masked_whiten(values, mask, std_floor=1e-4),
    }


jit_statistics = jax.jit(all_statistics)


@pytest.mark.parametrize("function", [all_statistics, jit_statistics], ids=["eager", "jit"])
def test_statistics_by_hand(function):
    actual = jax.device_get(function(jnp.asarray(VALUES), jnp.asarray(MASK)))
    assert actual["sum"] == 12.0
    assert actual["mean"] == 4.0
    variance = 26.0 / 3.0  # ((1-4)² + (3-4)² + (8-4)²) / 3
    np.testing.assert_allclose(actual["variance"], variance, rtol=1e-6)
    expected = np.array([[-3.0, 0.0, -1.0], [4.0, 0.0, 0.0]]) / variance**0.5
    np.testing.assert_allclose(actual["whitened"], expected, rtol=1e-6)


@pytest.mark.parametrize(("mask", "total"), [(NONE, 0.0), (ONE, 3.0)], ids=["none", "one"])
def test_defined_for_no_and_for_one_valid_entry(mask, total):
    actual = jax.device_get(jit_statistics(VALUES, mask))
    assert actual["sum"] == total
    assert actual["mean"] == total
    assert actual["variance"] == 0.0
    assert not actual["whitened"].any()


def test_masked_entries_do_not_reach_the_gradient():
    @jax.jit
    @jax.grad
    def gradient_of(values, mask):
        statistics = all_statistics(values, mask)
        return sum(jnp.sum((1 + weight) * x) for weight, x in enumerate(statistics.values()))

    for mask in (MASK, NONE, ONE):
        gradient = np.asarray(gradient_of(VALUES, mask))
        assert np.isfinite(gradient).all()
        assert not gradient[~mask].any()
        assert gradient[mask].all()


def test_whitening_does_not_blow_up_rounding():
    values = np.array([[0.3, 0.1 + 0.2, 0.30000001], [0, 0, 0]], np.float32)
    mask = np.array([[True] * 3, [False] * 3])
    assert not np.asarray(jit_statistics(values, mask)["whitened"]).any()


def test_zero_masked_is_float32_whatever_comes_in():
    assert zero_masked(jnp.ones((2, 3), jnp.bfloat16), jnp.asarray(MASK)).dtype == jnp.float32

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.kl import host_kl_estimates, kl_estimates

ESTIMATORS = ("k1", "k2", "k3")
P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.25, 0.25, 0.5])
MASK = np.array([[False, True, True, True]])


def masked_estimates(log_p, log_q):
    """[estimator, token] of a masked token, NaN on both sides, and the three given ones."""
    log_p, log_q = (jnp.pad(x, (1, 0), constant_values=jnp.nan)[None] for x in (log_p, log_q))
    mask = jnp.asarray(MASK)
    return jnp.stack([kl_estimates(log_p, log_q, mask, estimator=e)[0] for e in ESTIMATORS])


jit_estimates = jax.jit(masked_estimates)
jit_gradients = jax.jit(jax.jacobian(lambda p, q: masked_estimates(p, q).sum(1), argnums=(0, 1)))


def float32(values):
    return np.asarray(values, np.float32)


@pytest.mark.parametrize("function", [masked_estimates, jit_estimates], ids=["eager", "jit"])
def test_by_hand(function):
    expected = [
        [0, np.log(2), np.log(1.2), np.log(0.4)],
        [0, np.log(2) ** 2 / 2, np.log(1.2) ** 2 / 2, np.log(0.4) ** 2 / 2],
        [0, 0.5 - 1 + np.log(2), 0.25 / 0.3 - 1 + np.log(1.2), 2.5 - 1 + np.log(0.4)],
    ]
    actual = function(float32(np.log(P)), float32(np.log(Q)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_k1_and_k3_are_unbiased_under_the_sampling_distribution():
    estimates = np.asarray(jit_estimates(float32(np.log(P)), float32(np.log(Q))))[:, 1:]
    exact = np.sum(P * np.log(P / Q))
    k1, _, k3 = (estimates * P).sum(1)
    np.testing.assert_allclose([k1, k3], [exact, exact], rtol=1e-5)


@pytest.mark.parametrize("gap", [-30.0, -1.0, 0.0, 0.3, 30.0])
def test_the_host_gives_the_same_numbers(gap):
    log_p = np.log(P)
    log_q = log_p + np.array([gap, 0.0, -gap])
    expected = np.asarray(jit_estimates(float32(log_p), float32(log_q)))[:, 1:]
    for estimator, row in zip(ESTIMATORS, expected, strict=True):
        actual = host_kl_estimates(float32(log_p), float32(log_q), estimator=estimator)
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, row, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", [0, 1], ids=["trained policy sampled", "trained policy is other"])
def test_gradients_by_finite_differences(side):
    arguments = [np.log(P), np.log(Q)]
    gradients = np.asarray(jit_gradients(*map(float32, arguments))[side])  # [estimator, token]
    step = 1e-2
    for index in range(3):
        sums = []
        for sign in (1, -1):
            moved = list(arguments)
            moved[side] = moved[side] + sign * step * np.eye(3)[index]
            sums.append(np.asarray(jit_estimates(*map(float32, moved))).sum(1))
        numeric = (sums[0] - sums[1]) / (2 * step)
        np.testing.assert_allclose(gradients[:, index], numeric, rtol=2e-3)
    assert (np.abs(gradients) > 1e-3).all()  # finite too: the masked NaN does not leak


@pytest.mark.parametrize("gap", [-60.0, 30.0, 60.0])
def test_no_clamp_kills_or_turns_the_gradient_far_away(gap):
    log_p = np.full(3, -1.0, np.float32)
    log_q = log_p + np.float32(gap)
    assert np.isfinite(jit_estimates(log_p, log_q)).all()
    by_p, by_q = jax.device_get(jit_gradients(log_p, log_q))
    for gradient, towards in ((by_p, -np.sign(gap)), (by_q, np.sign(gap))):
        assert np.isfinite(gradient).all()
        assert (np.abs(gradient) > 0.5).all()
        # Descending k2 and k3 brings the two policies together.
        np.testing.assert_array_equal(np.sign(gradient[1:]), towards)

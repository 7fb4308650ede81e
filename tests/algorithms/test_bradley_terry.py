import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.bradley_terry import bradley_terry_loss, num_right

CHOSEN = jnp.asarray([1.0, 0.0, -1.0, jnp.nan])
REJECTED = jnp.asarray([0.0, 0.0, 1.0, 3.0])
VALID = jnp.asarray([True, True, True, False])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_loss_by_hand(wrap):
    # −log σ(1), log 2, −log σ(−2)
    expected = (0.31326169 + 0.69314718 + 2.12692801) / 3
    loss = wrap(bradley_terry_loss)(CHOSEN, REJECTED, valid=VALID)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_gradient_by_hand_and_none_of_what_is_masked():
    gradient = jax.grad(lambda c: bradley_terry_loss(c, REJECTED, valid=VALID))(CHOSEN)
    # −σ(−margin) / 3
    np.testing.assert_allclose(gradient, [-0.0896471, -0.1666667, -0.2935990, 0.0], rtol=1e-5)


def test_a_tie_is_half_right():
    assert num_right(CHOSEN, REJECTED, valid=VALID) == 1.5


def test_without_a_pair_there_is_nothing():
    none = jnp.zeros(4, bool)
    assert bradley_terry_loss(CHOSEN, REJECTED, valid=none) == 0.0
    assert num_right(CHOSEN, REJECTED, valid=none) == 0.0

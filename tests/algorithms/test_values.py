import jax
import jax.numpy as jnp
import numpy as np

from pipeline_rl_jax.algorithms.values import value_advantages, value_loss

RETURNS = jnp.array([[1.0, 1.0, jnp.nan]])
VALUES = jnp.array([[0.25, 1.5, jnp.nan]])
MASK = jnp.array([[True, True, False]])


def test_advantages_by_hand_without_gradient_to_the_values():
    def total(values):
        advantages = value_advantages(RETURNS, values, MASK)
        return advantages.sum(), advantages

    gradient, advantages = jax.jit(jax.grad(total, has_aux=True))(VALUES)
    np.testing.assert_allclose(advantages, [[0.75, -0.5, 0.0]])
    assert not np.asarray(gradient).any()


def test_loss_by_hand_and_its_gradient():
    def total(values):
        loss = value_loss(values, RETURNS, MASK)
        return loss.sum(), loss

    gradient, loss = jax.jit(jax.grad(total, has_aux=True))(VALUES)
    np.testing.assert_allclose(loss, [[0.28125, 0.125, 0.0]])
    np.testing.assert_allclose(gradient, [[-0.75, 0.5, 0.0]])

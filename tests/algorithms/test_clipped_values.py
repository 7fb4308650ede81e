import jax
import jax.numpy as jnp
import numpy as np

from pipeline_rl_jax.algorithms.clipped_values import clipped_value_loss
from pipeline_rl_jax.algorithms.values import value_loss

OLD = jnp.array([[1.0, 1.0, 1.0, 1.0, jnp.nan]])
# within ε; beyond ε towards the target; beyond ε away from it; beyond ε and past the target; masked
VALUES = jnp.array([[1.1, 1.5, 0.5, 4.0, jnp.nan]])
RETURNS = jnp.array([[2.0, 2.0, 2.0, 1.5, jnp.nan]])
MASK = jnp.array([[True, True, True, True, False]])


def compute(values, clip=0.2):
    result = clipped_value_loss(values, old_values=OLD, returns=RETURNS, mask=MASK, clip=clip)
    return result.loss.sum(), result


def test_by_hand_with_gradient():
    gradient, result = jax.jit(jax.grad(compute, has_aux=True))(VALUES)
    # (1.1−2)²; (1.2−2)² > (1.5−2)²; (0.5−2)² > (0.8−2)²; (4−1.5)² > (1.2−1.5)²
    np.testing.assert_allclose(result.loss, [[0.405, 0.32, 1.125, 3.125, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(result.clipped, [[0, 1, 0, 0, 0]])
    np.testing.assert_allclose(gradient, [[-0.9, 0.0, -1.5, 2.5, 0.0]], rtol=1e-6)


def test_a_wide_clip_is_the_plain_loss():
    _, result = compute(VALUES, clip=1e6)
    np.testing.assert_allclose(result.loss, value_loss(VALUES, RETURNS, MASK), rtol=1e-6)
    assert not np.asarray(result.clipped).any()


def test_at_the_old_values_the_gradient_is_that_of_the_plain_loss():
    gradient = jax.grad(lambda values: compute(values)[0])(jnp.nan_to_num(OLD))
    np.testing.assert_allclose(gradient, [[-1.0, -1.0, -1.0, -0.5, 0.0]])


def test_a_batch_without_valid_tokens_has_no_loss():
    result = clipped_value_loss(
        VALUES, old_values=OLD, returns=RETURNS, mask=jnp.zeros_like(MASK), clip=0.2
    )
    np.testing.assert_array_equal(result.loss, np.zeros((1, 5)))

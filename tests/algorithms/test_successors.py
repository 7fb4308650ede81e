import jax.numpy as jnp
import numpy as np

from pipeline_rl_jax.algorithms.successors import find_successors, last_tokens

SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 3, 0]])
MASK = jnp.array([[False, True, False, True, False, True, False, False]])


def test_successors_pass_over_masked_tokens_and_stay_in_their_segment():
    successors = find_successors(MASK, SEGMENTS)
    np.testing.assert_array_equal(successors.exists, [[1, 1, 1, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(successors.column, [[1, 3, 3, 0, 5, 0, 0, 0]])


def test_last_tokens_are_the_last_trainable_ones():
    np.testing.assert_array_equal(last_tokens(MASK, SEGMENTS), [[0, 0, 0, 1, 0, 1, 0, 0]])


def test_nothing_trainable_has_no_successor_and_no_last_token():
    nothing = jnp.zeros_like(MASK)
    assert not np.asarray(find_successors(nothing, SEGMENTS).exists).any()
    assert not np.asarray(last_tokens(nothing, SEGMENTS)).any()

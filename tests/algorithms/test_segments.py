import jax
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.segments import segment_means, segment_sums

# The same ids in both rows name different rollouts.
SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 3, 3]])
VALUES = np.array([[np.nan, 2, 4, 5, 7, np.inf], [1, 2, 3, 4, 9, np.nan]], np.float32)
MASK = np.array([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0]], bool)


def sums_and_means(values, mask, segment_ids):
    return (
        segment_sums(values, mask, segment_ids=segment_ids),
        segment_means(values, mask, segment_ids=segment_ids),
    )


@pytest.mark.parametrize(
    "function", [sums_and_means, jax.jit(sums_and_means)], ids=["eager", "jit"]
)
def test_by_hand(function):
    sums, means = function(*map(jax.numpy.asarray, (VALUES, MASK, SEGMENT_IDS)))
    np.testing.assert_array_equal(sums, [[6, 6, 6, 12, 12, 0], [0, 9, 9, 9, 9, 9]])
    np.testing.assert_array_equal(means, [[3, 3, 3, 6, 6, 0], [0, 3, 3, 3, 9, 9]])

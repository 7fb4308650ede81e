import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.aggregation import loss_weights

# Rollout 0 has two trainable tokens, 1 has three, 2 none: B = 3.
INDEX = np.array([[0, 0, 0, 2, -1], [1, 1, 1, 1, -1]], np.int32)
MASK = np.array([[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]], bool)
MODES = ("sequence_sum", "token_mean", "sequence_mean", "constant")


def all_modes(mask, index, num_sequences):
    weights = functools.partial(loss_weights, num_sequences=num_sequences, constant=20.0)
    return {mode: weights(mask, index, mode=mode) for mode in MODES}


jit_all_modes = jax.jit(all_modes)


@pytest.mark.parametrize("function", [all_modes, jit_all_modes], ids=["eager", "jit"])
def test_weights_by_hand(function):
    actual = function(jnp.asarray(MASK), jnp.asarray(INDEX), 3)
    for mode, first, second in [
        ("sequence_sum", 1 / 3, 1 / 3),
        ("token_mean", 1 / 5, 1 / 5),
        ("sequence_mean", 1 / 6, 1 / 9),
        ("constant", 1 / 60, 1 / 60),
    ]:
        expected = [[0, first, first, 0, 0], [0, second, second, second, 0]]
        np.testing.assert_allclose(actual[mode], expected, rtol=1e-6, err_msg=mode)
        assert actual[mode].dtype == jnp.float32


def test_zero_and_one_trainable_tokens():
    mask = np.zeros_like(MASK)
    for weights in jax.device_get(jit_all_modes(mask, INDEX, 1)).values():
        assert not weights.any()
    mask[1, 2] = True
    for mode, weights in jax.device_get(jit_all_modes(mask, INDEX, 1)).items():
        np.testing.assert_allclose(weights[1, 2], 1 / 20 if mode == "constant" else 1)
        assert not weights[~mask].any()


def test_sequence_mean_gives_every_rollout_the_same_weight():
    lengths = [3, 1, 3, 1, 6, 2]  # four rollouts in the first row, two in the second
    index = np.repeat(np.arange(6), lengths).reshape(2, 8).astype(np.int32)
    weights = np.asarray(jit_all_modes(np.ones((2, 8), bool), index, 6)["sequence_mean"])
    per_rollout = np.bincount(index.ravel(), weights=weights.ravel())
    np.testing.assert_allclose(per_rollout, np.full(6, 1 / 6), rtol=1e-6)

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.models.attention import segment_attention

attention = functools.partial(jax.jit, static_argnames="block_tokens")(segment_attention)

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 2]])


def _inputs(num_heads: int = 4, kv_heads: int = 2, head_width: int = 4):
    generator = np.random.default_rng(0)
    return [
        jnp.asarray(2.0 * generator.standard_normal((*SEGMENTS.shape, n, head_width)), jnp.float32)
        for n in (num_heads, kv_heads, kv_heads)
    ]


def _reference(query, key, value, segments):
    """One query, one head at a time, over the keys it may see."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    result = np.zeros_like(query)
    for row, t, head in np.ndindex(query.shape[:3]):
        visible = [s for s in range(t + 1) if segments[row, s] == segments[row, t]]
        kv_head = head // group
        scores = key[row, visible, kv_head] @ query[row, t, head] / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max())
        result[row, t, head] = weights / weights.sum() @ value[row, visible, kv_head]
    return result


@pytest.mark.parametrize(("block_tokens", "kv_heads"), [(4, 1), (5, 2), (100, 4)])
def test_attention_is_the_sum_over_visible_keys(block_tokens, kv_heads):
    query, key, value = _inputs(kv_heads=kv_heads)
    result = attention(query, key, value, jnp.asarray(SEGMENTS), block_tokens=block_tokens)
    np.testing.assert_allclose(result, _reference(query, key, value, SEGMENTS), atol=1e-5)


def test_the_first_token_of_a_segment_sees_itself_alone():
    query, key, value = _inputs(kv_heads=4)
    result = attention(query, key, value, jnp.asarray(SEGMENTS), block_tokens=100)
    np.testing.assert_allclose(result[0, 3], value[0, 3], atol=1e-6)
    np.testing.assert_allclose(result[1, 8], value[1, 8], atol=1e-6)


def test_not_a_number_in_another_segment_reaches_neither_value_nor_gradient():
    query, key, value = _inputs()
    segments = jnp.asarray(SEGMENTS)

    @jax.jit
    def second_segment_sum(value, key):
        result = attention(query, key, value, segments, block_tokens=4)
        return jnp.sum(result[0, 3:7])  # segment 2 of row 0

    poisoned = key.at[0, :3].set(1e30)  # huge scores at masked positions
    np.testing.assert_allclose(
        second_segment_sum(value, poisoned), second_segment_sum(value, key), rtol=1e-6
    )
    gradient = jax.jit(jax.grad(second_segment_sum))(value, key)
    assert np.all(np.asarray(gradient)[0, :3] == 0.0)
    assert np.all(np.asarray(gradient)[0, 7:] == 0.0)
    assert np.abs(np.asarray(gradient)[0, 3:7]).max() > 0.1


def test_blocks_do_not_change_the_gradient():
    query, key, value = _inputs()
    segments = jnp.asarray(SEGMENTS)

    def gradient(block_tokens):
        def loss(inputs):
            return jnp.sum(jnp.sin(attention(*inputs, segments, block_tokens=block_tokens)))

        return jax.jit(jax.grad(loss))((query, key, value))

    whole, blocked = gradient(9), gradient(5)
    for first, second in zip(whole, blocked, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)


def test_bfloat16_inputs_keep_a_float32_softmax():
    query, key, value = (x.astype(jnp.bfloat16) for x in _inputs())
    result = attention(query, key, value, jnp.asarray(SEGMENTS), block_tokens=9)
    assert result.dtype == jnp.bfloat16
    reference = _reference(*(x.astype(jnp.float32) for x in (query, key, value)), SEGMENTS)
    np.testing.assert_allclose(result.astype(jnp.float32), reference, atol=3e-2)

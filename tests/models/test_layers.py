from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.models.config import RopeScaling
from pipeline_rl_jax.models.layers import (
    apply_rope,
    finish_qkv,
    gated_mlp,
    project_qkv,
    rms_norm,
    rope_frequencies,
    rope_tables,
)


def test_rms_norm_by_hand():
    # mean of squares (9 + 16) / 2 = 12.5
    result = rms_norm(jnp.array([3.0, 4.0]), jnp.array([2.0, 1.0]), epsilon=0.0)
    np.testing.assert_allclose(result, [6 / math.sqrt(12.5), 4 / math.sqrt(12.5)], rtol=1e-6)


def test_rms_norm_of_bfloat16_takes_its_mean_in_float32():
    x = jnp.full((4096,), 1.0, jnp.bfloat16)  # a bfloat16 sum of ones stops at 256
    result = rms_norm(x, jnp.ones((4096,)), epsilon=0.0)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(result.astype(jnp.float32), 1.0)


def test_rope_turns_the_pair_i_and_i_plus_half():
    quarter_turn = jnp.array([math.pi / 2, 0.0])
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]])  # one head; pairs (1, 3) and (2, 4)
    result = apply_rope(x, jnp.cos(quarter_turn), jnp.sin(quarter_turn))
    np.testing.assert_allclose(result, [[-3.0, 2.0, 1.0, 4.0]], atol=1e-6)


def test_rotated_scores_depend_on_the_distance_alone(tiny_config):
    frequencies = jnp.asarray(rope_frequencies(tiny_config))
    query, key = jnp.array([[1.0, -2.0, 0.5, 3.0]]), jnp.array([[0.3, 1.0, -1.0, 2.0]])

    def score(query_position: int, key_position: int) -> float:
        rotated = [
            apply_rope(x, *rope_tables(jnp.array(position), frequencies))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(7, 3) == pytest.approx(score(54, 50), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_frequencies_by_hand(tiny_config):
    config = dataclasses.replace(tiny_config, head_width=4, rope_theta=10_000.0)
    np.testing.assert_allclose(rope_frequencies(config), [1.0, 0.01], rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones(tiny_config):
    # wavelengths 2π, 20π, 200π, 2000π; original context 40π: turns 20, 2, 0.2, 0.02
    scaling = RopeScaling(
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_positions=126,  # 40π = 125.66
    )
    config = dataclasses.replace(
        tiny_config, head_width=8, rope_theta=10_000.0, rope_scaling=scaling
    )
    turns = 126 / (20 * math.pi)
    smooth = (turns - 1) / 3
    between = (1 - smooth) * 0.1 / 8 + smooth * 0.1
    np.testing.assert_allclose(
        rope_frequencies(config), [1.0, between, 0.01 / 8, 0.001 / 8], rtol=1e-5
    )


def test_gated_mlp_by_hand():
    layer = {"gate": jnp.array([[1.0]]), "up": jnp.array([[3.0]]), "down": jnp.array([[0.5]])}
    silu = 2.0 / (1.0 + math.exp(-2.0))
    np.testing.assert_allclose(gated_mlp(jnp.array([2.0]), layer), [silu * 6.0 * 0.5], rtol=1e-6)


def test_biases_are_added_before_the_rotation(tiny_config):
    width, query_width, kv_width = 16, 16, 8
    layer = {
        "query": jnp.zeros((width, query_width)),
        "key": jnp.zeros((width, kv_width)),
        "value": jnp.zeros((width, kv_width)),
        "query_bias": jnp.arange(16.0),
        "key_bias": jnp.arange(8.0),
        "value_bias": jnp.arange(8.0) + 1,
    }
    rope = rope_tables(jnp.array([5]), jnp.asarray(rope_frequencies(tiny_config)))
    query, key, value = project_qkv(jnp.ones((1, width)), layer, tiny_config, rope=rope)
    assert (query.shape, key.shape, value.shape) == ((1, 4, 4), (1, 2, 4), (1, 2, 4))
    np.testing.assert_allclose(value[0], [[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = apply_rope(jnp.arange(8.0).reshape(1, 2, 4), *rope)
    np.testing.assert_allclose(key, expected, rtol=1e-6)
    assert not np.allclose(key, jnp.arange(8.0).reshape(1, 2, 4))


def test_head_norms_apply_to_each_head_before_the_rotation(tiny_config):
    config = dataclasses.replace(tiny_config, family="qwen3", qkv_bias=False, qk_norm=True)
    layer = {"query_norm": jnp.full((4,), 2.0), "key_norm": jnp.ones((4,))}
    position_zero = rope_tables(jnp.array([0]), jnp.asarray(rope_frequencies(config)))
    flat = jnp.concatenate([jnp.full((4,), 3.0), jnp.full((4,), -7.0)])[None]
    query, key, value = finish_qkv(flat, flat, flat, layer, config, rope=position_zero)
    np.testing.assert_allclose(query[0], [[2.0] * 4, [-2.0] * 4], rtol=1e-5)
    np.testing.assert_allclose(key[0], [[1.0] * 4, [-1.0] * 4], rtol=1e-5)
    np.testing.assert_allclose(value, flat.reshape(1, 2, 4))

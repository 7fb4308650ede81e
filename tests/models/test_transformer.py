from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline_rl_jax.models.transformer import Transformer, abstract_params, logits


def test_logits_are_those_of_transformers(golden, forward):
    result = forward(golden.params, golden.config, golden.token_ids)
    np.testing.assert_allclose(result, golden.logits, atol=1e-4, rtol=0)


def test_two_sequences_packed_in_a_row_give_the_logits_they_have_alone(golden, forward):
    first, second = golden.token_ids[0, :9], golden.token_ids[1, :13]
    padding = 5
    row = np.concatenate([first, second, np.full(padding, 7)])[None]
    packed = forward(
        golden.params,
        golden.config,
        row,
        positions=[[*range(9), *range(13), *range(padding)]],
        segment_ids=[[1] * 9 + [2] * 13 + [0] * padding],
    )
    np.testing.assert_allclose(packed[0, :9], golden.logits[0, :9], atol=1e-4, rtol=0)
    np.testing.assert_allclose(packed[0, 9:22], golden.logits[1, :13], atol=1e-4, rtol=0)
    assert np.isfinite(packed).all()


def test_a_later_token_changes_nothing_before_it(golden_qwen2, forward):
    changed = golden_qwen2.token_ids.copy()
    changed[:, 12] = (changed[:, 12] + 1) % 64
    result = forward(golden_qwen2.params, golden_qwen2.config, changed)
    np.testing.assert_allclose(result[:, :12], golden_qwen2.logits[:, :12], atol=1e-4, rtol=0)
    assert np.abs(result[:, 12] - golden_qwen2.logits[:, 12]).max() > 1e-2


@pytest.mark.parametrize("block_tokens", [5, 24])
def test_query_blocks_do_not_change_the_result(golden_qwen2, forward, block_tokens):
    result = forward(
        golden_qwen2.params,
        golden_qwen2.config,
        golden_qwen2.token_ids,
        attention_block_tokens=block_tokens,
    )
    np.testing.assert_allclose(result, golden_qwen2.logits, atol=1e-4, rtol=0)


def _gradient(golden, remat: str, block_tokens: int):
    token_ids = jnp.asarray(golden.token_ids[:, :8])

    def build():
        return Transformer(
            golden.config, rngs=nnx.Rngs(0), remat=remat, attention_block_tokens=block_tokens
        )

    graph, _ = nnx.split(nnx.eval_shape(build))

    @jax.jit
    @jax.grad
    def gradient(params):
        model = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(8), token_ids.shape)
        hidden = model(token_ids, positions=positions, segment_ids=jnp.ones_like(token_ids))
        return jnp.mean(jax.nn.logsumexp(logits(model, hidden), axis=-1) ** 2)

    return gradient(golden.params)


@pytest.fixture(scope="module")
def plain_gradient(golden_qwen2):
    return _gradient(golden_qwen2, "none", 8)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_does_not_change_the_gradient(golden_qwen2, plain_gradient, remat):
    again = _gradient(golden_qwen2, remat, 4)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain_gradient))
    assert largest > 1e-3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest, rtol=1e-4),
        plain_gradient,
        again,
    )


def test_bfloat16_activations_stay_close(golden_qwen2, forward):
    result = forward(
        golden_qwen2.params,
        golden_qwen2.config,
        golden_qwen2.token_ids,
        compute_dtype="bfloat16",
    )
    assert result.dtype == np.float32
    difference = np.abs(result - golden_qwen2.logits)
    assert 1e-4 < difference.max() < 0.3


def test_abstract_params_have_the_size_the_config_says(golden):
    leaves = jax.tree.leaves(abstract_params(golden.config))
    assert sum(leaf.size for leaf in leaves) == golden.config.num_parameters
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)

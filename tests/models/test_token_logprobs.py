from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.models.token_logprobs import token_logprobs

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 11, 6, 13


@pytest.fixture(scope="module")
def inputs():
    generator = np.random.default_rng(1)
    hidden = jnp.asarray(generator.standard_normal((ROWS, TOKENS, WIDTH)), jnp.float32)
    table = jnp.asarray(generator.standard_normal((VOCABULARY, WIDTH)), jnp.float32)
    token_ids = jnp.asarray(generator.integers(0, VOCABULARY, (ROWS, TOKENS)), jnp.int32)
    mask = generator.random((ROWS, TOKENS)) < 0.5
    mask[1], mask[2] = False, True
    return hidden, table, token_ids, jnp.asarray(mask)


def _reference(hidden, table, token_ids, mask, temperature):
    """Full logits, entry by entry."""
    scores = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T / temperature
    distribution = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    logprobs, entropy = np.zeros(mask.shape), np.zeros(mask.shape)
    for row, t in np.ndindex(mask.shape):
        if mask[row, t] and t > 0:
            previous = distribution[row, t - 1]
            logprobs[row, t] = previous[token_ids[row, t]]
            entropy[row, t] = -(np.exp(previous) * previous).sum()
    return logprobs, entropy


def test_by_hand():
    # token 1 is predicted from hidden 0: scores (0, ln 3), so probability 3/4
    hidden = jnp.array([[[math.log(3.0)], [50.0]]])
    table = jnp.array([[0.0], [1.0]])
    logprobs, entropy = jax.jit(token_logprobs)(
        hidden, table, jnp.array([[0, 1]]), jnp.array([[True, True]])
    )
    np.testing.assert_allclose(logprobs, [[0.0, math.log(0.75)]], rtol=1e-6)
    by_hand = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    np.testing.assert_allclose(entropy, [[0.0, by_hand]], rtol=1e-6)


@pytest.mark.parametrize(("chunk_tokens", "temperature"), [(1, 1.0), (12, 0.7), (1000, 0.7)])
def test_chunks_and_temperature(inputs, chunk_tokens, temperature):
    run = functools.partial(token_logprobs, temperature=temperature, chunk_tokens=chunk_tokens)
    expected = _reference(*(np.asarray(x) for x in inputs), temperature)
    for result, reference in zip(jax.jit(run)(*inputs), expected, strict=True):
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, reference, atol=2e-5)


def test_nothing_to_score_gives_zeros(inputs):
    hidden, table, token_ids, mask = inputs
    logprobs, entropy = jax.jit(token_logprobs)(hidden, table, token_ids, jnp.zeros_like(mask))
    assert not np.any(logprobs)
    assert not np.any(entropy)


def test_gradient_is_that_of_full_logits(inputs):
    hidden, table, token_ids, mask = inputs

    def chunked(hidden, table):
        logprobs, entropy = token_logprobs(hidden, table, token_ids, mask, chunk_tokens=7)
        return jnp.sum(logprobs) + 0.3 * jnp.sum(entropy)

    def whole(hidden, table):
        distribution = jax.nn.log_softmax(hidden @ table.T)[:, :-1]
        chosen = jnp.take_along_axis(distribution, token_ids[:, 1:, None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(distribution) * distribution, axis=-1)
        return jnp.sum(jnp.where(mask[:, 1:], chosen + 0.3 * entropy, 0.0))

    results = [jax.jit(jax.grad(f, argnums=(0, 1)))(hidden, table) for f in (chunked, whole)]
    for first, second in zip(*results, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)


def test_masked_hidden_states_that_are_not_finite_leak_nowhere(inputs):
    hidden, table, token_ids, _ = inputs
    mask = jnp.zeros((ROWS, TOKENS), bool).at[:, 5].set(True)  # reads hidden 4 only
    poisoned = hidden.at[:, 6:].set(jnp.nan).at[:, :4].set(jnp.inf)

    @jax.jit
    def total(hidden):
        return jnp.sum(token_logprobs(hidden, table, token_ids, mask, chunk_tokens=3)[0])

    np.testing.assert_allclose(total(poisoned), total(hidden), rtol=1e-6)
    gradient = np.asarray(jax.jit(jax.grad(total))(poisoned))
    assert np.isfinite(gradient).all()
    assert np.abs(gradient[:, 4]).max() > 0.01
    assert not gradient[:, 5:].any()


def test_bfloat16_states_are_scored_in_float32(inputs):
    hidden, table, token_ids, mask = inputs
    low = hidden.astype(jnp.bfloat16)
    logprobs, _ = jax.jit(token_logprobs)(low, table, token_ids, mask)
    exact = _reference(
        *(np.asarray(x, np.float32) for x in (low, table.astype(jnp.bfloat16))),
        np.asarray(token_ids),
        np.asarray(mask),
        1.0,
    )[0]
    np.testing.assert_allclose(logprobs, exact, atol=1e-4)

"""Sampling: the right distribution, the right logprob, and randomness of its four inputs only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.generation.sampling import sample, uniforms


def _draw(logits, u, temperature=1.0, **cuts):
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (len(u), len(logits)))
    return sample(rows, jnp.asarray(u, jnp.float32), jnp.full(len(u), temperature), **cuts)


def test_inverts_the_cumulative_distribution_by_hand():
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    tokens, logprobs = _draw(logits, [0.0, 0.05, 0.15, 0.25, 0.35, 0.59, 0.61, 0.999])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_allclose(logprobs[:3], np.log([0.1, 0.1, 0.2]), rtol=1e-5)
    assert logprobs.dtype == jnp.float32


def test_frequencies_match_the_tempered_softmax_over_a_large_vocabulary():
    logits = 2 * jax.random.normal(jax.random.key(0), (1000,))
    u = (np.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = _draw(logits, u, temperature=0.7)
    expected = jax.nn.softmax(logits / 0.7)
    counts = np.bincount(tokens, minlength=1000) / 20_000
    np.testing.assert_allclose(counts, expected, atol=1.1 / 20_000 + 1e-5)
    np.testing.assert_allclose(logprobs, jnp.log(expected)[tokens], atol=1e-4)


def test_zero_temperature_is_greedy():
    logits = np.array([0.0, 3.0, 2.9])
    tokens, logprobs = _draw(logits, [0.0, 0.5, 0.999], temperature=0.0)
    assert tokens.tolist() == [1, 1, 1]
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits)[1], rtol=1e-5)


def test_top_k_and_top_p_renormalise():
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    tokens, logprobs = _draw(logits, [0.0, 0.42, 0.44, 0.99], top_k=2)
    assert tokens.tolist() == [2, 2, 3, 3]
    np.testing.assert_allclose(logprobs[0], np.log(3 / 7), rtol=1e-5)
    tokens, logprobs = _draw(logits, [0.0, 0.2, 0.3, 0.99], top_p=0.75)
    assert tokens.tolist() == [1, 1, 2, 3]  # 0.4 + 0.3 is below 0.75, so 0.2 is in as well
    np.testing.assert_allclose(logprobs[-1], np.log(4 / 9), rtol=1e-5)
    tokens, _ = _draw(logits, [0.0, 0.5, 0.99], top_k=3, top_p=0.5)
    assert set(tokens.tolist()) == {2, 3}  # within the three kept: 0.4/0.9 < 0.5


def test_a_target_lost_to_rounding_never_draws_an_impossible_token():
    logits = np.full(300, -np.inf)
    logits[[3, 140]] = 0.0
    tokens, logprobs = _draw(logits, [0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))])
    assert tokens.tolist() == [3, 140, 140]
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("changed", range(3))
def test_uniforms_depend_on_every_input_and_on_nothing_else(changed):
    ids = [jnp.array([1, 2, 3]), jnp.array([0, 1, 0]), jnp.array([5, 5, 9])]
    together = uniforms(7, *ids)
    alone = [uniforms(7, *(x[i : i + 1] for x in ids))[0] for i in range(3)]
    np.testing.assert_array_equal(together, jnp.stack(alone))
    other = list(ids)
    other[changed] = ids[changed] + 1
    assert not np.any(uniforms(7, *other) == together)
    assert not np.any(uniforms(8, *ids) == together)

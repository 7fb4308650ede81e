import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.losses import (
    ClipRange,
    PolicyTokens,
    cispo,
    entropy_bonus,
    gspo,
    is_reinforce,
    ppo,
)

# One masked token that is NaN everywhere, then every side of every bound for both signs.
RATIOS = np.array([np.nan, 0.5, 1.0, 1.1, 1.5, 8.0, 0.5, 1.1, 1.5, 8.0, 8.0])
ADVANTAGES = np.array([np.nan, 1, 1, 1, 1, 2, -1, -1, -1, -1, 0])
BEHAVIOUR = np.full(11, -3.0)
CURRENT = BEHAVIOUR + np.log(RATIOS)
MASK = ~np.isnan(RATIOS)
CLIP = ClipRange(low=0.2, high=0.28)


def row(values):
    return np.asarray(values)[None]


def make_tokens(ratios=RATIOS, advantages=ADVANTAGES, mask=MASK, segment_ids=None):
    behaviour = np.full(len(ratios), -3.0)
    ids = np.ones(len(ratios), np.int32) if segment_ids is None else np.asarray(segment_ids)
    return PolicyTokens(
        current_logprobs=row((behaviour + np.log(ratios)).astype(np.float32)),
        behaviour_logprobs=row(np.where(mask, behaviour, np.nan).astype(np.float32)),
        advantages=row(np.asarray(advantages, np.float32)),
        mask=row(np.asarray(mask, bool)),
        segment_ids=row(ids.astype(np.int32)),
    )


def evaluate(loss_function, tokens):
    """Loss terms, statistics and the gradient of their sum by the current logprobs, per token."""
    return jax.tree.map(lambda x: np.asarray(x)[0], jit_evaluate(loss_function, tokens))


@functools.partial(jax.jit, static_argnums=0)
def jit_evaluate(loss_function, tokens):
    def total(current_logprobs):
        result = loss_function(tokens._replace(current_logprobs=current_logprobs))
        return result.loss.sum(), result

    (_, result), gradient = jax.value_and_grad(total, has_aux=True)(tokens.current_logprobs)
    return result.loss, result.statistics, gradient


def clamped(clamp):
    return functools.partial(is_reinforce, clamp=clamp)


PPO = functools.partial(ppo, clip=CLIP)
LOSSES = pytest.mark.parametrize(
    "loss_function",
    [
        clamped(5.0),
        PPO,
        functools.partial(cispo, clip_high=0.28),
        functools.partial(gspo, clip=CLIP),
    ],
    ids=["is_reinforce", "ppo", "cispo", "gspo"],
)


def test_is_reinforce_by_hand():
    loss, statistics, gradient = evaluate(clamped(5.0), make_tokens())
    weights = np.array([0, 0.5, 1, 1.1, 1.5, 5, 0.5, 1.1, 1.5, 5, 5])
    expected_gradient = -weights * np.where(MASK, ADVANTAGES, 0)
    # The weight is detached: the gradient is that of log π alone.
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5)
    np.testing.assert_allclose(loss, expected_gradient * np.where(MASK, CURRENT, 0), rtol=1e-5)
    np.testing.assert_allclose(statistics["weights"], weights, rtol=1e-5)
    np.testing.assert_array_equal(statistics["clipped"], [0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1])
    eager = is_reinforce(jax.tree.map(jnp.asarray, make_tokens()), clamp=5.0)
    np.testing.assert_allclose(eager.loss[0], loss, rtol=1e-6)


def test_ppo_by_hand():
    loss, statistics, gradient = evaluate(PPO, make_tokens())
    expected = [0, -0.5, -1, -1.1, -1.28, -2.56, 0.8, 1.1, 1.5, 8, 0]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    # ∇ −r·A = −r·A·∇log π where no bound holds, 0 where one does.
    expected_gradient = [0, -0.5, -1, -1.1, 0, 0, 0, 1.1, 1.5, 8, 0]
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5)
    np.testing.assert_array_equal(statistics["clipped"], [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0])
    weights = [0, 0.8, 1, 1.1, 1.28, 1.28, 0.8, 1.1, 1.28, 1.28, 1.28]
    np.testing.assert_allclose(statistics["weights"], weights, rtol=1e-5)


def test_dual_clip_bounds_negative_terms_only():
    dual = functools.partial(ppo, clip=CLIP._replace(dual=3.0))
    loss, statistics, gradient = evaluate(dual, make_tokens())
    plain_loss, plain_statistics, plain_gradient = evaluate(PPO, make_tokens())
    far_negative = 9  # ratio 8, advantage −1: −max(−8, 3·−1)
    np.testing.assert_allclose(loss[far_negative], 3.0)
    assert gradient[far_negative] == 0.0
    assert statistics["clipped"][far_negative] == 1.0
    others = np.arange(11) != far_negative
    np.testing.assert_array_equal(loss[others], plain_loss[others])
    np.testing.assert_array_equal(gradient[others], plain_gradient[others])
    np.testing.assert_array_equal(
        statistics["clipped"][others], plain_statistics["clipped"][others]
    )


def test_ppo_without_bounds_is_unclipped():
    unbounded = functools.partial(ppo, clip=ClipRange(low=np.inf, high=np.inf))
    loss, statistics, gradient = evaluate(unbounded, make_tokens())
    surrogate = np.where(MASK, -RATIOS * ADVANTAGES, 0)
    np.testing.assert_allclose(loss, surrogate, rtol=1e-5)
    np.testing.assert_allclose(gradient, surrogate, rtol=1e-5)
    assert not statistics["clipped"].any()


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    _, statistics, gradient = evaluate(functools.partial(cispo, clip_high=0.28), make_tokens())
    weights = np.where(MASK, np.minimum(RATIOS, 1.28), 0)
    np.testing.assert_allclose(gradient, -weights * np.where(MASK, ADVANTAGES, 0), rtol=1e-5)
    np.testing.assert_array_equal(statistics["clipped"], [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1])


def test_gspo_clips_a_completion_as_a_whole():
    # Two completions: ratios (0.5, 8), geometric mean 2, A = 1; and (2, 1/2), mean 1, A = −1.
    tokens = make_tokens(
        ratios=np.array([1.0, 0.5, 8.0, 1.0, 2.0, 0.5]),
        advantages=[0, 1, 1, 0, -1, -1],
        mask=[0, 1, 1, 0, 1, 1],
        segment_ids=[1, 1, 1, 2, 2, 2],
    )
    loss, statistics, gradient = evaluate(functools.partial(gspo, clip=CLIP), tokens)
    np.testing.assert_allclose(loss, [0, -1.28, -1.28, 0, 1, 1], rtol=1e-5)
    np.testing.assert_array_equal(statistics["clipped"], [0, 1, 1, 0, 0, 0])
    np.testing.assert_allclose(gradient, [0, 0, 0, 0, 1, 1], rtol=1e-5)
    # The measures stay those of tokens.
    np.testing.assert_allclose(statistics["log_ratios"][2], np.log(8), rtol=1e-5)


@LOSSES
def test_at_ratio_one_every_loss_is_the_plain_policy_gradient(loss_function):
    tokens = make_tokens(ratios=np.where(MASK, 1.0, np.nan))
    _, statistics, gradient = evaluate(loss_function, tokens)
    np.testing.assert_allclose(gradient, np.where(MASK, -ADVANTAGES, 0), rtol=1e-5)
    assert not statistics["clipped"].any()


@pytest.mark.parametrize("num_valid", [0, 1])
@LOSSES
def test_rows_with_no_and_with_one_valid_token(loss_function, num_valid):
    mask = np.arange(11) == (4 if num_valid else 11)
    tokens = make_tokens(np.where(mask, 1.0, np.nan), mask=mask)
    loss, statistics, gradient = evaluate(loss_function, tokens)
    for array in (loss, gradient, *statistics.values()):
        assert np.isfinite(array).all()
        assert not array[~mask].any()
    np.testing.assert_allclose(gradient.sum(), -num_valid, rtol=1e-5)


def test_entropy_bonus_by_hand():
    entropies, mask = jnp.array([[jnp.nan, 2.0]]), jnp.array([[False, True]])
    bonus = entropy_bonus(entropies, mask, coefficient=0.1)
    np.testing.assert_allclose(bonus, [[0.0, -0.2]], rtol=1e-6)

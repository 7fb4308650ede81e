"""Corrections beside a loss: by hand, and against the losses they must coincide with."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.objective import policy_loss
from pipeline_rl_jax.algorithms.packing import TrainingSequence, pack
from tests.fakes.rollouts import make_completion, make_prompt
from tests.fakes.settings import make_algorithm_settings

RATIOS = np.array([0.25, 0.8, 1.0, 1.15, 4.0, 8.0])
LOSSES = ("is_reinforce", "ppo", "cispo", "gspo")


def make_batch(advantage=-1.0):
    completion = make_completion(make_prompt(num_tokens=1), range(len(RATIOS)), logprobs=-3.0)
    sequence = TrainingSequence(completion=completion, advantages=advantage, returns=0.0)
    return pack([sequence], tokens_per_row=8, rows_per_micro_batch=1)


BATCH = make_batch()
CURRENT = np.full((1, 8), np.nan, np.float32)
CURRENT[0, 1:7] = -3.0 + np.log(RATIOS)


@functools.partial(jax.jit, static_argnums=0)
def evaluate_row(settings, current):
    def total(current):
        result = policy_loss(settings, current_logprobs=current, batch=BATCH)
        return result.loss.sum(), result

    gradient, result = jax.grad(total, has_aux=True)(current)
    return result.loss, result.statistics, gradient


def evaluate(**changes):
    """Loss, statistics and gradient of the completion's tokens."""
    loss, statistics, gradient = evaluate_row(make_algorithm_settings(**changes), CURRENT)
    for array in (loss, gradient, *statistics.values()):
        assert not np.asarray(array)[0, [0, 7]].any()  # nothing leaks from prompt and padding
    tokens = {name: np.asarray(array)[0, 1:7] for name, array in statistics.items()}
    return np.asarray(loss)[0, 1:7], tokens, np.asarray(gradient)[0, 1:7]


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_beside_a_loss_on_the_sampler_only_takes_tokens_out(loss):
    plain, plain_statistics, plain_gradient = evaluate(loss=loss)
    terms, statistics, gradient = evaluate(
        loss=loss, is_correction="masked", is_lowest=0.5, is_highest=4.0
    )
    inside = np.array([0, 1, 1, 1, 1, 0])  # 4.0 itself stays
    np.testing.assert_allclose(terms, plain * inside, rtol=1e-5)
    np.testing.assert_allclose(gradient, plain_gradient * inside, rtol=1e-5)
    assert gradient[inside == 1].any()
    np.testing.assert_array_equal(
        statistics["clipped"], np.where(inside, plain_statistics["clipped"], 1)
    )
    np.testing.assert_allclose(statistics["log_ratios"], np.log(RATIOS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_correction_a_loss_anchored_at_the_weights_in_training_is_on_policy(loss):
    _, statistics, gradient = evaluate(loss=loss, ratio_anchor="current")
    np.testing.assert_allclose(gradient, np.ones(6), rtol=1e-5)  # -A · ∇ log π
    assert not statistics["clipped"].any()
    # What is measured is still the distance to the sampler.
    np.testing.assert_allclose(statistics["log_ratios"], np.log(RATIOS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("correction", "weights"),
    [("truncated", [0.25, 0.8, 1, 1.15, 4, 4]), ("masked", [0, 0.8, 1, 1.15, 4, 0])],
)
def test_corrections_beside_a_loss_anchored_at_the_weights_in_training(loss, correction, weights):
    _, statistics, gradient = evaluate(
        loss=loss,
        ratio_anchor="current",
        is_correction=correction,
        is_lowest=0.5,
        is_highest=4.0,
    )
    np.testing.assert_allclose(gradient, weights, rtol=1e-5)
    np.testing.assert_allclose(statistics["weights"], weights, rtol=1e-5)
    outside = RATIOS > 4.0 if correction == "truncated" else (RATIOS > 4.0) | (RATIOS < 0.5)
    np.testing.assert_array_equal(statistics["clipped"], outside)


def test_truncated_beside_ppo_is_the_papers_loss():
    corrected = evaluate(
        loss="ppo", ratio_anchor="current", is_correction="truncated", is_highest=5.0
    )
    paper = evaluate(loss="is_reinforce", importance_clamp=5.0)
    np.testing.assert_allclose(corrected[2], paper[2], rtol=1e-5)
    for name in ("weights", "clipped", "log_ratios"):
        np.testing.assert_allclose(corrected[1][name], paper[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correction", ["truncated", "masked"])
def test_what_is_added_beside_the_policy_loss_is_not_corrected(correction):
    """A token that leaves the policy loss is still pulled to the reference."""
    changes = {"ratio_anchor": "current", "is_lowest": 0.5, "is_highest": 2.0}
    kl = {"kl_coefficient": 0.3, "kl_estimator": "k2"}
    added = [
        [with_kl - without for with_kl, without in zip(left[::2], right[::2], strict=True)]
        for left, right in (
            (evaluate(**changes, **kl), evaluate(**changes)),
            (
                evaluate(**changes, **kl, is_correction=correction),
                evaluate(**changes, is_correction=correction),
            ),
        )
    ]
    for plain, corrected in zip(*added, strict=True):
        np.testing.assert_allclose(corrected, plain, rtol=1e-4)
        assert (np.abs(plain) > 0.1).all()


@pytest.mark.parametrize("correction", ["truncated", "masked"])
@pytest.mark.parametrize("num_valid", [0, 1])
def test_no_and_one_valid_token(correction, num_valid):
    settings = make_algorithm_settings(ratio_anchor="current", is_correction=correction)
    mask = np.zeros_like(BATCH.loss_mask)
    mask[0, 3] = bool(num_valid)
    batch = dataclasses.replace(BATCH, loss_mask=mask)
    loss, statistics = jax.jit(
        lambda current: policy_loss(settings, current_logprobs=current, batch=batch)
    )(np.where(mask, CURRENT, np.nan))
    for array in (loss, *statistics.values()):
        assert np.isfinite(array).all()
        assert not np.asarray(array)[~mask].any()
    assert np.count_nonzero(loss) == num_valid

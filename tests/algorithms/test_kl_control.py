import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.algorithms.kl import kl_estimates
from pipeline_rl_jax.algorithms.kl_control import AdaptiveKl, FixedKl, shape_rewards

NAN = jnp.nan


def adaptive(**changes) -> AdaptiveKl:
    return AdaptiveKl(
        **{"coefficient": 0.2, "target_nats": 6.0, "horizon_rollouts": 10_000, **changes}
    )


def test_adaptive_by_hand():
    control = adaptive()
    control.observe(6.6, num_rollouts=1000)  # error 0.1, share 0.1
    assert control.coefficient == pytest.approx(0.2 * 1.01)
    control.observe(4.8, num_rollouts=1000)  # error −0.2
    assert control.coefficient == pytest.approx(0.2 * 1.01 * 0.98)


def test_the_error_is_bounded_on_both_sides():
    up, down = adaptive(), adaptive()
    up.observe(600.0, num_rollouts=1000)
    down.observe(0.0, num_rollouts=1000)
    assert up.coefficient == pytest.approx(0.2 * 1.02)
    assert down.coefficient == pytest.approx(0.2 * 0.98)


def test_a_step_larger_than_the_horizon_counts_as_one_horizon():
    control = adaptive(horizon_rollouts=10)
    control.observe(0.0, num_rollouts=1000)
    assert control.coefficient == pytest.approx(0.2 * 0.8)


def test_on_target_it_stays_and_fixed_always_does():
    control, fixed = adaptive(), FixedKl(0.05)
    for each in (control, fixed):
        each.observe(6.0, num_rollouts=1000)
    assert control.coefficient == 0.2
    fixed.observe(99.0, num_rollouts=1000)
    assert fixed.coefficient == 0.05


def test_a_restored_controller_goes_on():
    first, second = adaptive(), adaptive()
    first.observe(600.0, num_rollouts=1000)
    second.restore(first.snapshot())
    assert second.coefficient == first.coefficient
    fixed = FixedKl(0.1)
    fixed.restore(FixedKl(0.3).snapshot())
    assert fixed.coefficient == 0.1


def test_what_could_not_steer_is_refused():
    with pytest.raises(ValueError, match=r"coefficient \(0.0\)"):
        adaptive(coefficient=0.0)
    with pytest.raises(ValueError, match="must be finite"):
        adaptive().observe(float("nan"), num_rollouts=1)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_rewards_by_hand(transform):
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 0]])
    # A masked token inside the first completion; the last token of the second is masked.
    mask = jnp.array([[False, True, False, True, True, False, False]])
    current = jnp.array([[NAN, -1.0, -9.0, -2.0, -3.0, NAN, NAN]])
    reference = jnp.array([[NAN, -1.5, -1.0, -1.0, -3.0, NAN, NAN]])
    scores = jnp.array([[NAN, 5.0, 5.0, 5.0, -1.0, NAN, NAN]])
    kl = kl_estimates(current, reference, mask, estimator="k1")
    rewards = transform(
        lambda: shape_rewards(kl, scores, mask=mask, segment_ids=segments, coefficient=0.1)
    )()
    # −0.1·0.5; 5 − 0.1·(−1); −1 − 0
    np.testing.assert_allclose(rewards, [[0, -0.05, 0, 5.1, -1.0, 0, 0]], rtol=1e-6)


def test_the_rewards_of_a_completion_add_up_to_its_score_minus_the_penalty():
    random = np.random.default_rng(0)
    segments = jnp.array([[1] * 6 + [2] * 4])
    mask = jnp.asarray(random.random((1, 10)) < 0.8)
    kl = jnp.asarray(random.normal(size=(1, 10)), jnp.float32)
    scores = jnp.where(segments == 1, 1.0, -2.0)
    rewards = shape_rewards(kl, scores, mask=mask, segment_ids=segments, coefficient=0.3)
    for segment, score in ((1, 1.0), (2, -2.0)):
        inside = np.asarray(mask & (segments == segment))
        penalty = 0.3 * np.asarray(kl)[inside].sum()
        assert np.asarray(rewards)[inside].sum() == pytest.approx(score - penalty, abs=1e-5)

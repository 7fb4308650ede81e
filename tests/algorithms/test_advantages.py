import numpy as np
import pytest

from pipeline_rl_jax.algorithms.advantages import (
    compute_advantages,
    group_mean,
    group_std,
    leave_one_out,
    zero_variance,
)
from tests.fakes.settings import make_algorithm_settings

# Groups of 3, 2 and 1, their members interleaved.
GROUPS = np.array([0, 1, 0, 2, 1, 0])
REWARDS = np.array([1.0, 3.0, 0.0, 5.0, 1.0, 0.5])
ALL = np.ones(6, bool)


def advantages(rewards=REWARDS, groups=GROUPS, valid=None, **changes):
    valid = np.ones(len(rewards), bool) if valid is None else np.asarray(valid, bool)
    return compute_advantages(
        make_algorithm_settings(**changes),
        rewards=np.asarray(rewards, np.float64),
        group_index=np.asarray(groups),
        valid=valid,
    )


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("none", REWARDS),
        ("group_mean", [0.5, 1.0, -0.5, 0.0, -1.0, 0.0]),
        # 1 − (0 + 0.5)/2, 3 − 1, 0 − (1 + 0.5)/2, a group of one, 1 − 3, 0.5 − (1 + 0)/2
        ("leave_one_out", [0.75, 2.0, -0.75, 0.0, -2.0, 0.0]),
        ("batch_mean", REWARDS - 1.75),
    ],
)
def test_baselines_by_hand_with_groups_of_unequal_size(baseline, expected):
    actual = advantages(baseline=baseline)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_leave_one_out_is_the_group_mean_advantage_scaled_by_n_over_n_minus_one():
    rewards = np.array([0.2, 0.9, 0.4, 0.7])
    np.testing.assert_allclose(
        advantages(rewards, [0, 0, 0, 0], baseline="leave_one_out"),
        advantages(rewards, [0, 0, 0, 0], baseline="group_mean") * 4 / 3,
        rtol=1e-6,
    )


@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out", "batch_mean"])
@pytest.mark.parametrize("normalise", ["normalise_std", "batch_normalise", None])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 100.0])
def test_an_invalid_member_is_as_if_it_were_not_there(baseline, normalise, bad):
    settings = {"baseline": baseline, **({normalise: True} if normalise else {})}
    without = advantages([1.0, 0.0, 3.0, 1.0], [0, 0, 1, 1], **settings)
    rewards, groups = [1.0, bad, 0.0, 3.0, 1.0], [0, 0, 0, 1, 1]
    with_bad = advantages(rewards, groups, [1, 0, 1, 1, 1], **settings)
    np.testing.assert_array_equal(with_bad, np.insert(without, 1, 0.0))


def test_divided_by_the_group_standard_deviation():
    std = np.std([1.0, 0.0, 0.5])
    expected = [0.5 / std, 1.0, -0.5 / std, 0.0, -1.0, 0.0]
    np.testing.assert_allclose(advantages(normalise_std=True), expected, rtol=1e-6)


def test_whitened_over_the_batch():
    whitened = advantages(baseline="none", batch_normalise=True)
    np.testing.assert_allclose(whitened, (REWARDS - 1.75) / REWARDS.std(), rtol=1e-6)
    np.testing.assert_allclose([whitened.mean(), whitened.std()], [0, 1], atol=1e-6)


@pytest.mark.parametrize("changes", [{"normalise_std": True}, {"batch_normalise": True}])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize(
    "rewards", [[1.0, 1.0, 1.0], [0.3, 0.1 + 0.2, 0.3], [0.1, 0.1 + 1e-9, 0.1]]
)
def test_equal_and_nearly_equal_rewards_give_no_advantage(rewards, baseline, changes):
    assert not advantages(rewards, [0, 0, 0], baseline=baseline, **changes).any()


def test_groups_without_and_with_one_valid_member():
    for baseline in ("group_mean", "leave_one_out"):
        one = advantages([1.0, np.nan], [0, 0], [1, 0], baseline=baseline, normalise_std=True)
        np.testing.assert_array_equal(one, [0.0, 0.0])
        none = advantages([np.nan, np.nan, 4.0], [0, 0, 1], [0, 0, 1], baseline=baseline)
        np.testing.assert_array_equal(none, [0.0, 0.0, 0.0])
    assert advantages([], np.zeros(0, int)).shape == (0,)


def test_penalties_come_off_before_the_baseline_but_do_not_set_the_scale():
    rewards, penalties = np.array([1.0, 0.0, 1.0, 1.0]), np.array([0.1, 0.3, 0.0, 0.002])
    rest = {
        "rewards": rewards,
        "penalties": penalties,
        "group_index": np.array([0, 0, 1, 1]),
        "valid": np.ones(4, bool),
    }
    plain = compute_advantages(make_algorithm_settings(), **rest)
    np.testing.assert_allclose(plain, [0.6, -0.6, 0.001, -0.001], rtol=1e-5)
    # Over the spread of the rewards themselves: 0.5, and none in the second group, whose
    # difference of 0.002 would otherwise become advantages of 1.
    scaled = compute_advantages(make_algorithm_settings(normalise_std=True), **rest)
    np.testing.assert_allclose(scaled, [1.2, -1.2, 0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out", "batch_mean", "value"])
def test_what_a_failure_leaves_of_a_group_is_a_group(baseline, size):
    """Sizes 1 to n beside a whole group: finite, and as if the group had been asked for so."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 1.0, *(np.arange(size) % 2)])
    group_index = np.array([0] * 5 + [1] * size)
    settings = make_algorithm_settings(baseline=baseline)
    advantages = compute_advantages(
        settings, rewards=rewards, group_index=group_index, valid=np.ones(5 + size, bool)
    )
    mine, mean = rewards[5:], rewards[5:].mean()
    expected = {
        "none": mine,
        "value": mine,
        "group_mean": mine - mean,
        "leave_one_out": (mine - mean) * size / max(1, size - 1),
        "batch_mean": mine - rewards.mean(),
    }[baseline]
    np.testing.assert_allclose(advantages[5:], expected, atol=1e-6)


def test_group_statistics_by_hand():
    valid = np.array([True, True, True, True, False, True])
    np.testing.assert_allclose(
        group_mean(REWARDS, GROUPS, valid=valid), [0.5, 3, 0.5, 5, 3, 0.5], rtol=1e-12
    )
    # The invalid member's own entry is the mean of all the valid ones.
    np.testing.assert_allclose(leave_one_out(REWARDS, GROUPS, valid=valid)[4], 3.0)
    np.testing.assert_allclose(
        group_std(REWARDS, GROUPS, valid=valid)[[0, 1, 3]], [np.std([1, 0, 0.5]), 0, 0]
    )


def test_zero_variance_marks_groups_of_two_or_more_equal_rewards():
    groups = np.array([0, 0, 1, 1, 2, 3, 3, 3])
    rewards = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 0.3, 0.1 + 0.2, np.nan])
    valid = np.isfinite(rewards)
    marked = zero_variance(rewards, groups, valid=valid, std_floor=1e-4)
    np.testing.assert_array_equal(marked, [1, 1, 0, 0, 0, 1, 1, 1])

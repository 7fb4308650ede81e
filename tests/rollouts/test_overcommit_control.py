import json

import pytest

from pipeline_rl_jax.rollouts.overcommit_control import OvercommitController


def controller(variant: str = "additive", **changes) -> OvercommitController:
    arguments = {
        "start_groups": 4, "min_groups": 0, "max_groups": 8, "change_groups": 1, "window_steps": 2,
        **changes,
    }  # fmt: skip
    return OvercommitController(variant=variant, **arguments)


def observe(subject: OvercommitController, *rewards: float) -> list[int]:
    return [subject.observe(reward) for reward in rewards]


def test_slope_by_hand():
    subject = controller()
    observe(subject, 0.1, 0.5)
    assert subject.slope is None
    observe(subject, 0.2)  # ((0.5 − 0.1) + (0.2 − 0.5)) / 2
    assert subject.slope == pytest.approx(0.05)
    observe(subject, 0.3)  # ((0.2 − 0.5) + (0.3 − 0.2)) / 2
    assert subject.slope == pytest.approx(-0.1)


def test_additive_moves_by_the_change_once_the_window_is_full():
    # slopes: -, -, 0.05, -0.1, 0.2, 0 (a flat reward is no rise)
    assert observe(controller(), 0.1, 0.5, 0.2, 0.3, 0.6, 0.3) == [4, 4, 5, 4, 5, 4]
    assert observe(controller(change_groups=3), 0.0, 0.0, 1.0, 2.0) == [4, 4, 7, 8]


def test_proportional_moves_by_a_quarter_and_at_least_by_one():
    rising = controller("proportional", start_groups=3, max_groups=100, window_steps=1)
    # +1 below 8 groups, then ⌊8/4⌋, ⌊10/4⌋, ⌊12/4⌋, ⌊15/4⌋
    rewards = [float(step) for step in range(10)]
    assert observe(rising, *rewards) == [3, 4, 5, 6, 7, 8, 10, 12, 15, 18]
    falling = controller("proportional", start_groups=20, max_groups=20, window_steps=1)
    assert observe(falling, 5.0, 4.0, 3.0, 2.0) == [20, 15, 12, 9]


def test_the_bounds_hold():
    assert observe(controller(window_steps=1, max_groups=5), 0.0, 1.0, 2.0, 3.0) == [4, 5, 5, 5]
    assert observe(controller(window_steps=1, min_groups=3), 0.0, 0.0, 0.0) == [4, 3, 3]


def test_fixed_stays():
    subject = OvercommitController(variant="fixed", start_groups=6)
    assert observe(subject, 0.0, 1.0, 2.0) == [6, 6, 6]
    assert subject.metrics()["overcommit/delta_groups"] == 6.0


def test_metrics_leave_an_unknown_slope_out():
    subject = controller(window_steps=1)
    assert subject.metrics() == {"overcommit/delta_groups": 4.0}
    observe(subject, 0.0, 0.5)
    assert subject.metrics() == {"overcommit/delta_groups": 5.0, "overcommit/reward_slope": 0.5}


def test_a_restored_controller_goes_on_as_the_first_would():
    first, second = controller(), controller()
    observe(first, 0.1, 0.5, 0.2)
    second.restore(json.loads(json.dumps(first.snapshot())))
    rest = [0.3, 0.6, 0.3]
    assert observe(second, *rest) == observe(first, *rest)
    narrower = controller(start_groups=2, max_groups=2)
    narrower.restore(first.snapshot())
    assert narrower.groups == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_groups": 9}, r"start_groups \(9\)"),
        ({"min_groups": -1}, r"min_groups \(-1\)"),
        ({"change_groups": 0}, r"change_groups \(0\)"),
        ({"window_steps": 0}, r"window_steps \(0\)"),
    ],
)
def test_settings_of_no_use_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        controller(**changes)


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="must be finite"):
        controller().observe(float("nan"))

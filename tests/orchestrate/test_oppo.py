import collections

import pytest

from tests.fakes.stages import (
    FakeGeneration,
    FakeTraining,
    World,
    long_tailed,
    make_overcommit,
    make_plan,
    run_schedule,
)


def run(**overcommit):
    world = World(
        generation=FakeGeneration(slots=16, length=long_tailed),
        training=FakeTraining(seconds=lambda version: 2.0),
    )
    plan = make_plan(batch_groups=4, num_steps=60, overcommit=make_overcommit(**overcommit))
    report, seconds = run_schedule("oppo", world, plan)
    assert report.ended == "num_steps"
    assert report.admitted_rollouts == report.trained_rollouts == 60 * 4 * 2
    return world, seconds


def test_overcommitting_saves_the_wait_for_the_longest():
    _, plain = run(start_groups=0)
    _, overcommitted = run(start_groups=4)
    assert overcommitted < 0.8 * plain


@pytest.mark.parametrize("max_deferrals", [0, 1, 2])
def test_no_group_is_deferred_beyond_the_bound(max_deferrals):
    world, _ = run(start_groups=4, max_deferrals=max_deferrals)
    assert max(world.training.lags) == max_deferrals
    histogram = collections.Counter()
    for report in world.observer.reports:
        metrics = report.metrics
        assert metrics["overcommit/deferrals_max_steps"] <= max_deferrals
        histogram = {k: v for k, v in metrics.items() if k.startswith("overcommit/deferred_")}
    del histogram["overcommit/deferred_groups"]
    assert sum(histogram.values()) == 60 * 4  # every group that trained, once


def test_delta_follows_the_reward():
    world, _ = run(variant="additive", start_groups=3, window_steps=1)
    reports = world.observer.reports
    deltas = [report.metrics["overcommit/delta_groups"] for report in reports]
    assert deltas[0] == 3
    rewards = [
        sum(rollout.reward for group in report.groups for rollout in group.rollouts)
        for report in reports
    ]
    for step in range(1, len(deltas) - 1):
        rising = rewards[step] > rewards[step - 1]
        expected = min(8, deltas[step] + 1) if rising else max(0, deltas[step] - 1)
        assert deltas[step + 1] == expected


def test_a_stop_counts_what_was_deferred():
    world = World(generation=FakeGeneration(slots=16, length=long_tailed))
    plan = make_plan(batch_groups=4, num_steps=60)
    report, _ = run_schedule("oppo", world, plan, stop_after_seconds=30.0)
    assert report.ended == "stopped"
    assert report.admitted_rollouts == report.trained_rollouts + sum(report.dropped.values())

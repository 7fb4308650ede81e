"""One schedule turns into another where their definitions coincide, token for token."""

import numpy as np
import pytest

from tests.fakes.stages import (
    FakeGeneration,
    FakePreprocess,
    FakeScoring,
    FakeTraining,
    World,
    long_tailed,
    make_overcommit,
    make_plan,
    run_schedule,
    unit,
)

# Those that are one: lag 0 everywhere.
ON_POLICY = [
    ("conventional", {"steps_per_round": 1}),
    ("one_step_off", {"steps_per_round": 1, "overlap": False}),
    ("pipeline", {"max_lag": 0}),
    ("oppo", {"overcommit": make_overcommit(start_groups=0)}),
]


def run_world(name: str, changes: dict, **parts) -> World:
    world = World(**{key: make() for key, make in parts.items()})
    report, _ = run_schedule(name, world, make_plan(**changes))
    assert report.ended == "num_steps"
    return world


def assert_same(worlds: list[World]) -> None:
    first = worlds[0]
    for world in worlds[1:]:
        assert world.observer.trained_prompts == first.observer.trained_prompts
        for batch, expected in zip(world.training.batches, first.training.batches, strict=True):
            np.testing.assert_array_equal(batch.token_ids, expected.token_ids)
            np.testing.assert_array_equal(batch.weight_versions, expected.weight_versions)
        assert world.training.digest == first.training.digest


@pytest.mark.parametrize(
    ("slots", "group_size", "batch_groups"),
    [(8, 2, 4), (4, 3, 5), (3, 7, 1), (64, 1, 8)],
    ids=["as many slots", "batch beyond slots", "group beyond slots", "more slots than batch"],
)
def test_on_policy_schedules_are_one(slots, group_size, batch_groups):
    shape = {"group_size": group_size, "batch_groups": batch_groups, "num_steps": 8}
    worlds = [
        run_world(
            name,
            {**shape, **changes},
            generation=lambda: FakeGeneration(slots=slots, length=long_tailed),
        )
        for name, changes in ON_POLICY
    ]
    assert_same(worlds)
    assert all(world.training.lags == [0] * 8 for world in worlds)
    ids = [prompt_id for batch in worlds[0].observer.trained_prompts for prompt_id in batch]
    assert ids == list(range(8 * batch_groups))


def test_on_policy_schedules_are_one_when_rollouts_fail_and_groups_are_refused():
    def make_scoring():
        return FakeScoring(fails=lambda c: unit("fail", c.token_ids.tolist()) < 0.2)

    def make_preprocess():
        return FakePreprocess(
            refuses=lambda group: unit("refuse", group.prompt.prompt_id) < 0.4, max_refused=10**6
        )

    worlds = [
        run_world(
            name,
            {"num_steps": 12, "batch_groups": 3, "group_size": 3, **changes},
            generation=lambda: FakeGeneration(length=long_tailed),
            scoring=make_scoring,
            preprocess=make_preprocess,
        )
        for name, changes in ON_POLICY
    ]
    assert_same(worlds)
    sizes = {
        len(group.rollouts) for report in worlds[0].observer.reports for group in report.groups
    }
    assert sizes > {3}, "no group was partial"
    assert worlds[0].observer.reports[-1].dropped["refused"] > 0


def test_timing_does_not_matter_on_policy():
    def slow_chunks(chunk: int) -> float:
        return 0.1 + 5 * unit("chunk", chunk)

    slow = run_world(
        "pipeline",
        {"max_lag": 0},
        generation=lambda: FakeGeneration(slots=5, seconds=slow_chunks, length=long_tailed),
        training=lambda: FakeTraining(seconds=lambda version: 0.01),
    )
    fast = run_world(
        "pipeline",
        {"max_lag": 0, "scores_in_flight": 1},
        generation=lambda: FakeGeneration(slots=3, tokens_per_chunk=7, length=long_tailed),
        scoring=lambda: FakeScoring(seconds=lambda c: 9 * unit("score", c.sample_index)),
    )
    assert_same([slow, fast])


def test_off_policy_schedules_are_different():
    """The equalities above would hold of fakes that ignore weights; these do not."""
    worlds = [
        run_world(name, {"num_steps": 8, **changes}, generation=lambda: FakeGeneration(slots=8))
        for name, changes in [
            *ON_POLICY[:1],
            ("one_step_off", {}),
            ("pipeline", {"max_lag": 3}),
            ("conventional", {"steps_per_round": 4}),
        ]
    ]
    assert len({world.training.digest for world in worlds}) == 4


def test_a_round_is_shuffled_by_the_seed_and_by_nothing_else():
    def trained(seed: int, seconds: float) -> list[list[int]]:
        world = run_world(
            "conventional",
            {"steps_per_round": 4, "num_steps": 8, "seed": seed},
            generation=lambda: FakeGeneration(length=long_tailed, seconds=lambda chunk: seconds),
        )
        return world.observer.trained_prompts

    batches = trained(seed=1, seconds=1.0)
    assert batches == trained(seed=1, seconds=0.01)
    assert batches != trained(seed=2, seconds=1.0)
    first_round = [prompt_id for batch in batches[:4] for prompt_id in batch]
    assert sorted(first_round) == list(range(8))
    assert batches[:4] != [[0, 1], [2, 3], [4, 5], [6, 7]]

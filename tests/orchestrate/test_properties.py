"""What holds of every schedule in every world: bounds, accounts, and an end."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from tests.fakes.stages import (
    SCHEDULES,
    FakeGeneration,
    FakePreprocess,
    FakeScoring,
    FakeTraining,
    World,
    make_overcommit,
    make_plan,
    run_schedule,
    unit,
)

plans = st.builds(
    dict,
    num_steps=st.integers(1, 9),
    batch_groups=st.integers(1, 4),
    group_size=st.integers(1, 4),
    max_lag=st.integers(0, 4),
    beyond_max_lag=st.sampled_from(["wait", "wait", "drop", "mask"]),
    spare_groups=st.integers(0, 8),
    publish_every_steps=st.integers(1, 5),
    steps_per_round=st.integers(1, 4),
    overlap=st.booleans(),
    overcommit=st.builds(
        make_overcommit,
        variant=st.sampled_from(["fixed", "additive", "proportional"]),
        start_groups=st.integers(0, 4),
        max_groups=st.integers(4, 9),
        max_deferrals=st.integers(0, 3),
    ),
    scores_in_flight=st.integers(1, 6),
)
worlds = st.builds(
    dict,
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 12),
    tokens_per_chunk=st.integers(1, 5),
    longest_tokens=st.sampled_from([1, 6, 60]),
    step_seconds=st.sampled_from([0.01, 1.0, 20.0]),
    score_seconds=st.sampled_from([0.0, 0.5, 30.0]),
    publication_seconds=st.sampled_from([0.0, 0.3, 40.0]),
    failing_share=st.sampled_from([0.0, 0.0, 0.2, 0.7]),
    refused_share=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    empty_share=st.sampled_from([0.0, 0.0, 0.3]),
    num_prompts=st.sampled_from([None, None, 0, 7, 20]),
)


def make_world(drawn: dict) -> World:
    seed = drawn["seed"]

    def chance(name: str, share: float):
        return lambda *parts: unit(seed, name, *parts) < share

    fails = chance("fail", drawn["failing_share"])
    refuses = chance("refuse", drawn["refused_share"])
    empty = chance("empty", drawn["empty_share"])
    return World(
        generation=FakeGeneration(
            slots=drawn["slots"],
            tokens_per_chunk=drawn["tokens_per_chunk"],
            length=lambda p, s: 1 + int(drawn["longest_tokens"] * unit(seed, "length", p, s) ** 4),
            seconds=lambda chunk: 2 * unit(seed, "chunk", chunk),
            seed=seed,
        ),
        scoring=FakeScoring(
            seconds=lambda c: drawn["score_seconds"] * unit(seed, c.prompt.prompt_id),
            fails=lambda c: fails(c.prompt.prompt_id, c.sample_index),
        ),
        preprocess=FakePreprocess(
            refuses=lambda group: refuses(group.prompt.prompt_id),
            empty=lambda version, groups: empty(groups[0].prompt.prompt_id),
        ),
        training=FakeTraining(seconds=lambda v: 2 * drawn["step_seconds"] * unit(seed, "step", v)),
        publication_seconds=drawn["publication_seconds"],
        num_prompts=drawn["num_prompts"],
    )


def find_bound(name: str, changes: dict) -> int:
    if name == "pipeline":
        return changes["max_lag"]
    if name == "oppo":
        return changes["overcommit"].max_deferrals
    rounds_at_once = 2 if name == "one_step_off" and changes["overlap"] else 1
    return rounds_at_once * changes["steps_per_round"] - 1


@hypothesis.settings(deadline=None, max_examples=120)
@hypothesis.given(
    name=st.sampled_from(["pipeline", "pipeline", *SCHEDULES]), plan=plans, drawn=worlds
)
def test_every_run_ends_keeps_its_bound_and_loses_nothing(name, plan, drawn):
    changes = {
        **plan,
        "stream_groups": plan["batch_groups"] + plan["spare_groups"],
        "publish_every_steps": min(plan["publish_every_steps"], plan["max_lag"] + 1),
        "deadline_seconds": 5000.0,  # reached by a deadlock only
    }
    del changes["spare_groups"]
    world = make_world(drawn)
    report, _ = run_schedule(name, world, make_plan(**changes))

    assert report.ended == ("num_steps" if report.version == changes["num_steps"] else "data")
    assert report.ended == "num_steps" or drawn["num_prompts"] is not None
    assert max(world.training.lags, default=0) <= find_bound(name, changes)

    assert report.admitted_rollouts == report.trained_rollouts + sum(report.dropped.values())
    assert report.trained_rollouts == sum(len(b.token_ids) for b in world.training.batches)
    trained = [i for batch in world.observer.trained_prompts for i in batch]
    assert len(trained) == len(set(trained)) == report.version * changes["batch_groups"]
    assert all(batch == sorted(batch) for batch in world.observer.trained_prompts)

    for batch in world.training.batches:
        for versions in batch.weight_versions:
            assert (np.diff(versions[versions >= 0]) >= 0).all()
    if report.ended == "data":  # nothing that would have filled a batch is left
        left = report.dropped.get("left_at_end", 0)
        assert left < changes["batch_groups"] * changes["group_size"]
        assert world.prompts.num_unfinished < changes["batch_groups"]
    else:
        assert "left_at_end" not in report.dropped
        assert world.prompts.num_unfinished == 0

"""How runs end, whatever their schedule: all steps, no data, a stop, a failure, a hang."""

import asyncio
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from pipeline_rl_jax.orchestrate.failures import HopelessRun, StageFailure
from pipeline_rl_jax.orchestrate.stages import RunReport
from pipeline_rl_jax.records import StopReason
from pipeline_rl_jax.rollouts.ledger import PromptLedger
from pipeline_rl_jax.rollouts.waits import WaitedTooLong
from tests.fakes.stages import (
    SCHEDULES,
    FakeGeneration,
    FakePreprocess,
    FakeScoring,
    FakeTraining,
    NumberedPrompts,
    World,
    long_tailed,
    make_plan,
    run_schedule,
    unit,
)
from tests.fakes.virtual_clock import run_virtual

every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def trained_ids(world: World) -> list[int]:
    return [prompt_id for batch in world.observer.trained_prompts for prompt_id in batch]


def assert_all_accounted_for(report: RunReport) -> None:
    assert report.admitted_rollouts == report.trained_rollouts + sum(report.dropped.values())


@every_schedule
def test_the_last_step_ends_the_run_and_its_weights_are_published(name):
    world = World(generation=FakeGeneration(length=long_tailed))
    report, _ = run_schedule(name, world, make_plan(num_steps=9))
    assert (report.ended, report.version, report.trained_rollouts) == ("num_steps", 9, 36)
    assert world.publication.latest().version == 9
    assert world.publication.latest().digest == world.training.digest
    assert world.generation.num_live == 0
    assert_all_accounted_for(report)
    assert report.dropped == {}  # nothing was begun that no step was left for


@every_schedule
def test_a_run_that_is_already_complete_ends_at_once(name):
    world = World(training=FakeTraining(version=6))
    report, seconds = run_schedule(name, world, make_plan(num_steps=6))
    assert (report.ended, report.version, report.admitted_rollouts) == ("num_steps", 6, 0)
    assert seconds < 1


@every_schedule
def test_the_first_weights_are_there_before_the_first_token(name):
    """At step 0 and after a resume alike: nothing is sampled from what was there before."""
    world = World(training=FakeTraining(version=3), publication_seconds=30.0)
    run_schedule(name, world, make_plan(num_steps=5, max_lag=0))
    assert world.publication.sent[0] == 3
    first = world.training.batches[0]
    assert set(first.weight_versions[first.loss_mask]) == {3}


@every_schedule
def test_data_that_ends_is_trained_on_in_whole_batches_and_the_rest_is_counted(name):
    world = World(num_prompts=11, generation=FakeGeneration(length=long_tailed))
    plan = make_plan(num_steps=100, batch_groups=3, group_size=2)
    report, _ = run_schedule(name, world, plan)
    assert (report.ended, report.version) == ("data", 3)
    assert (report.admitted_rollouts, report.trained_rollouts) == (22, 18)
    assert report.dropped == {"left_at_end": 4}
    assert world.prompts.num_unfinished == 2


@every_schedule
@pytest.mark.parametrize("num_prompts", [0, 1])
def test_data_of_less_than_one_batch_ends_the_run_without_a_step(name, num_prompts):
    world = World(num_prompts=num_prompts)
    report, _ = run_schedule(name, world, make_plan())
    assert (report.ended, report.version) == ("data", 0)
    assert report.dropped == ({"left_at_end": 2} if num_prompts else {})


@every_schedule
@pytest.mark.parametrize("stop_after_seconds", [0.0, 1.5, 7.3, 20.1, 40.7])
def test_a_stop_lets_the_step_that_is_being_taken_finish_and_begins_no_other(
    name, stop_after_seconds
):
    world = World(
        generation=FakeGeneration(slots=6, length=long_tailed),
        training=FakeTraining(seconds=lambda version: 5.0),
    )
    plan = make_plan(num_steps=1000, batch_groups=3, max_lag=3, steps_per_round=3)
    report, seconds = run_schedule(name, world, plan, stop_after_seconds=stop_after_seconds)
    assert report.ended == "stopped"
    assert seconds <= stop_after_seconds + 5 + 2  # a step, an arrival or a chunk
    assert report.version == len(world.training.batches) == len(world.observer.reports)
    assert world.publication.latest().version == report.version
    assert_all_accounted_for(report)
    assert world.generation.num_live == 0


@every_schedule
def test_a_stop_before_the_beginning(name):
    async def main():
        stop = asyncio.Event()
        stop.set()
        return await SCHEDULES[name].run(World().stages, make_plan(), stop=stop)

    report = run_virtual(main())
    assert (report.ended, report.trained_rollouts) == ("stopped", 0)


@every_schedule
@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(stops=st.lists(st.floats(0, 60), max_size=3), seed=st.integers(0, 99))
def test_over_stops_and_resumes_no_prompt_is_repeated_and_none_is_skipped(name, stops, seed):
    """Each run goes on from the ledger of the one before. Some groups are dropped in between."""
    count, batch_groups = 30, 3
    trained: list[int] = []
    dropped: list[int] = []
    snapshot, version = {"stream": {"next": 0}, "finished": []}, 0

    def refuses(group) -> bool:
        refused = unit(seed, group.prompt.prompt_id) < 0.2
        if refused:
            dropped.append(group.prompt.prompt_id)
        return refused

    for stop_after_seconds in [*stops, None]:
        world = World(
            generation=FakeGeneration(slots=5, length=lambda p, s: long_tailed(p + seed, s)),
            preprocess=FakePreprocess(refuses=refuses, max_refused=10**6),
            training=FakeTraining(version=version),
            prompts=PromptLedger(NumberedPrompts(count)),
        )
        world.prompts.restore(json.loads(json.dumps(snapshot)))
        plan = make_plan(num_steps=1000, batch_groups=batch_groups, max_lag=3, steps_per_round=2)
        report, _ = run_schedule(name, world, plan, stop_after_seconds=stop_after_seconds)
        snapshot, version = world.prompts.snapshot(), report.version
        trained += trained_ids(world)
    assert len(set(trained + dropped)) == len(trained) + len(dropped)
    left = set(range(count)) - set(trained) - set(dropped)
    assert len(left) < batch_groups


FAILING = ["data", "generation", "scoring", "preprocess", "training", "publication", "observer"]


def break_stage(world: World, stage: str, behave) -> None:
    """Replaces what the schedule calls of a stage, from its third call on, by `behave()`."""
    owner, method = {
        "data": (world.stages.prompts, "next"),
        "generation": (world.generation, "advance"),
        "scoring": (world.scoring, "score"),
        "preprocess": (world.preprocess, "assemble"),
        "training": (world.training, "train"),
        "publication": (world.stages.publication, "wait_for"),
        "observer": (world.observer, "after_step"),
    }[stage]
    original, calls = getattr(owner, method), []

    def broken(*args):
        calls.append(args)
        return behave() if len(calls) > 2 else original(*args)

    setattr(owner, method, broken)


@every_schedule
@pytest.mark.parametrize("stage", FAILING)
def test_a_stage_that_fails_ends_the_run_within_seconds_by_name(name, stage):
    world = World(generation=FakeGeneration(slots=8))

    async def fail():
        raise OSError(f"the {stage} machine is gone")

    def fail_now():
        raise OSError(f"the {stage} machine is gone")

    break_stage(world, stage, fail_now if stage == "data" else fail)
    seconds: list[float] = []

    async def main():
        try:
            await SCHEDULES[name].run(world.stages, make_plan(num_steps=1000, max_lag=3))
        finally:
            seconds.append(asyncio.get_running_loop().time())

    with pytest.raises(StageFailure) as caught:
        run_virtual(main())
    assert str(caught.value) == f"{stage}: OSError: the {stage} machine is gone"
    assert caught.value.stage == stage
    assert isinstance(caught.value.cause, OSError)
    assert seconds[0] < 60


@every_schedule
@pytest.mark.parametrize("stage", FAILING[1:])
def test_a_stage_that_hangs_is_named_at_the_deadline(name, stage):
    world = World(generation=FakeGeneration(slots=8))
    break_stage(world, stage, lambda: asyncio.Event().wait())
    plan = make_plan(num_steps=1000, max_lag=3, deadline_seconds=100.0)
    with pytest.raises(StageFailure) as caught:
        run_schedule(name, world, plan)
    assert isinstance(caught.value.cause, WaitedTooLong)
    message = str(caught.value)
    assert f"{stage} was at work for 100 s" in message or f"{stage} is at work" in message, message


@every_schedule
def test_a_run_without_a_single_score_ends_and_tells_why(name):
    world = World(scoring=FakeScoring(fails=lambda completion: True))
    with pytest.raises(StageFailure) as caught:
        run_schedule(name, world, make_plan(num_steps=10))
    assert caught.value.stage == "scoring"
    assert isinstance(caught.value.cause, HopelessRun)
    assert "256 completions in a row could not be scored, 256 of them for no_score" in str(
        caught.value
    )


@every_schedule
def test_a_trainer_that_counts_wrong_is_found_out(name):
    class Stuck(FakeTraining):
        async def train(self, batch):
            metrics = await super().train(batch)
            self.version = 1
            return metrics

    with pytest.raises(StageFailure, match=r"training: .* is at weight version 1, expected 2"):
        run_schedule(name, World(training=Stuck()), make_plan())


@every_schedule
def test_a_decode_loop_that_keeps_its_first_weights_is_found_out(name):
    class Stale(FakeGeneration):
        first = None

        async def advance(self, weights):
            self.first = self.first or weights
            return await super().advance(self.first)

    with pytest.raises(StageFailure, match=r"generation: .* holds a token more than . steps older"):
        run_schedule(name, World(generation=Stale(slots=4)), make_plan(num_steps=20, max_lag=1))


@every_schedule
def test_batches_that_come_to_nothing_cost_no_step_and_end_a_run_that_has_no_other(name):
    world = World(preprocess=FakePreprocess(empty=lambda version, groups: version == 2))
    counted = []
    world.preprocess.empty = lambda version, groups: (
        version == 2 and len(counted) < 3 and not counted.append(1)
    )
    report, _ = run_schedule(name, world, make_plan(num_steps=5))
    assert (report.version, report.dropped["batch_empty"]) == (5, 12)
    assert world.prompts.num_unfinished == 0
    assert_all_accounted_for(report)

    hopeless = World(preprocess=FakePreprocess(empty=lambda version, groups: True))
    with pytest.raises(StageFailure, match=r"preprocess: .*200 batches in a row held nothing"):
        run_schedule(name, hopeless, make_plan())


@every_schedule
def test_completions_that_the_decode_loop_gives_up_are_dropped_unscored(name):
    class GivingUp(FakeGeneration):
        def _complete(self, sample):
            completion = super()._complete(sample)
            if sample.prompt.prompt_id % 3 == 0:
                object.__setattr__(completion, "stop_reason", StopReason.CANCELLED)
            return completion

    world = World(
        generation=GivingUp(), scoring=FakeScoring(fails=lambda c: c.prompt.prompt_id % 3 == 0)
    )
    report, _ = run_schedule(name, world, make_plan(num_steps=4))
    assert report.version == 4
    assert "no_score" not in report.dropped
    assert report.dropped["cancelled"] >= world.scoring.num_forgotten >= 8
    assert not world.scoring.reading
    assert not [prompt_id for prompt_id in trained_ids(world) if prompt_id % 3 == 0]
    assert_all_accounted_for(report)


@every_schedule
def test_a_model_that_fails_while_it_reads_along_ends_the_run(name):
    class Failing(FakeScoring):
        def read(self, chunks):
            if any(chunk.prompt.prompt_id == 5 for chunk in chunks):
                raise RuntimeError("device lost")
            super().read(chunks)

    with pytest.raises(StageFailure, match="scoring: RuntimeError: device lost"):
        run_schedule(name, World(scoring=Failing()), make_plan(num_steps=20))

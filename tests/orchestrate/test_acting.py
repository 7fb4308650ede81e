import asyncio

import pytest

from pipeline_rl_jax.orchestrate.acting import Actor
from pipeline_rl_jax.orchestrate.failures import StageFailure
from pipeline_rl_jax.orchestrate.flow import Flow
from pipeline_rl_jax.rewards.score import ScoringFailure
from pipeline_rl_jax.rollouts.staleness import LagBound
from tests.fakes.stages import FakeGeneration, FakePreprocess, FakeScoring, World, make_plan
from tests.fakes.virtual_clock import run_virtual


def act(world: World, scenario, *, max_waiting_groups: int = 0, **changes):
    """Runs `scenario(flow, actor)` with version 0 published, and returns what it returns."""

    async def main():
        plan = make_plan(**changes)
        flow = Flow(world.stages, plan, bound=LagBound(max_lag=plan.max_lag, beyond="wait"))
        actor = Actor(flow, horizon_name="max_lag", max_waiting_groups=max_waiting_groups)
        async with flow.running():
            return await scenario(flow, actor)

    return run_virtual(main())


async def turn(flow: Flow, actor: Actor, *, horizon: int) -> bool:
    return await actor.turn(flow.stages.publication.latest(), horizon=horizon)


def test_slots_are_filled_with_whole_groups_and_the_last_may_wait_for_slots():
    world = World(generation=FakeGeneration(slots=5))

    async def scenario(flow, actor):
        assert await turn(flow, actor, horizon=10)
        return flow.account.num_out, world.generation.num_live, flow.admitted_rollouts

    assert act(world, scenario, group_size=2, num_steps=10) == (3, 6, 6)


def test_the_horizon_ends_admission_and_what_is_live_is_still_decoded():
    world = World(generation=FakeGeneration(slots=50, length=lambda prompt, sample: 8))

    async def scenario(flow, actor):
        turns = 0
        while await turn(flow, actor, horizon=1):
            turns += 1
            assert flow.account.num_out == 2
        return turns, [item.order for item in flow.groups.drain()]

    turns, orders = act(world, scenario, num_steps=10)
    assert turns == 4 + 1  # four chunks of two tokens, one wait for the scores
    assert orders == [0, 1]


def test_a_full_stream_ends_admission_and_rollouts_being_scored_are_in_it():
    world = World(
        generation=FakeGeneration(slots=8, length=lambda prompt, sample: 2),
        scoring=FakeScoring(seconds=lambda completion: 30.0),
    )

    async def scenario(flow, actor):
        await turn(flow, actor, horizon=50)
        admitted_first = flow.admitted_rollouts
        await turn(flow, actor, horizon=50)  # 8 rollouts are being scored: 4 groups
        assert flow.admitted_rollouts == admitted_first == 8
        await asyncio.sleep(40)
        assert len(flow.groups) == 4
        assert not await turn(flow, actor, horizon=50)
        flow.groups.drain()
        assert await turn(flow, actor, horizon=50)
        return flow.admitted_rollouts

    assert act(world, scenario, max_waiting_groups=4, num_steps=50) == 16


def test_idle_slots_are_counted_against_who_holds_them_up():
    """One group of two in eight slots: three quarters of 4 s of decoding, then all of 5 s."""
    world = World(
        generation=FakeGeneration(slots=8, length=lambda prompt, sample: 8),
        scoring=FakeScoring(seconds=lambda completion: 0.0),
    )

    async def scenario(flow, actor):
        while await turn(flow, actor, horizon=1):
            pass
        asyncio.get_running_loop().call_later(5.0, flow.notify)
        await actor.wait_for_change()
        return flow.waits.seconds["generation", "trainer (max_lag)"]

    assert act(world, scenario, batch_groups=1, num_steps=10) == pytest.approx(0.75 * 4 + 5)


def test_the_next_turn_does_not_wait_for_scores():
    world = World(
        generation=FakeGeneration(slots=2, length=lambda prompt, sample: 2),
        scoring=FakeScoring(seconds=lambda completion: 10.0),
    )

    async def scenario(flow, actor):
        for _ in range(4):
            await turn(flow, actor, horizon=50)
        return asyncio.get_running_loop().time(), world.scoring.num_at_once

    seconds, at_once = act(world, scenario, num_steps=50)
    assert 4 <= seconds < 5
    assert at_once >= 6


def test_lost_refused_and_empty_groups_make_room_for_others():
    world = World(
        generation=FakeGeneration(slots=50),
        scoring=FakeScoring(fails=lambda c: c.prompt.prompt_id == 0 or c.sample_index == 1),
        preprocess=FakePreprocess(refuses=lambda group: group.prompt.prompt_id == 2),
    )

    async def scenario(flow, actor):
        while await turn(flow, actor, horizon=1):
            pass
        return flow.drops.counts, flow.groups.drain()

    drops, items = act(world, scenario, batch_groups=2, num_steps=10)
    assert [item.group.prompt.prompt_id for item in items] == [1, 3]
    assert [item.num_rollouts for item in items] == [1, 1]
    assert drops == {"no_score": 2 + 3, "refused": 1}
    assert world.prompts.snapshot() == {"stream": {"next": 1}, "finished": [2]}


class CountingScoring(FakeScoring):
    """Scores the completions that `scored` names by their number, the first being 1."""

    def __init__(self, scored):
        super().__init__(fails=lambda completion: True)
        self.scored = scored
        self.num_asked = 0

    async def score(self, completion):
        self.num_asked += 1
        self.fails = lambda _: not self.scored(self.num_asked)
        failure = await super().score(completion)
        if isinstance(failure, ScoringFailure):
            reason = "rare" if self.num_asked % 10 == 0 else "down"
            return ScoringFailure(reason=reason, detail=f"the {self.num_asked}th")
        return failure


def test_completions_in_a_row_without_a_score_end_the_run():
    """Twice 300 with one score between them would be too many, one of them is."""
    scoring = CountingScoring(scored=lambda number: number in (299, 300))

    async def scenario(flow, actor):
        while await turn(flow, actor, horizon=1):
            pass

    # 75 rollouts a batch: 4 batches are 300.
    plan = {"group_size": 25, "batch_groups": 3, "scores_in_flight": 1, "num_steps": 1000}
    world = World(generation=FakeGeneration(slots=25), scoring=scoring)
    with pytest.raises(StageFailure) as caught:
        act(world, scenario, **plan)
    assert str(caught.value) == (
        "scoring: HopelessRun: 300 completions in a row could not be scored, 270 of them for down "
        "(the last one: the 600th); mend the reward (rewards.*) or the answers in the data, then "
        "run the same command again"
    )


def test_a_group_remembers_the_version_at_its_admission():
    world = World(generation=FakeGeneration(slots=2))

    async def scenario(flow, actor):
        await turn(flow, actor, horizon=50)
        world.training.version = 4
        await flow.update_generation()
        while not len(flow.groups):
            await turn(flow, actor, horizon=50)
        item = flow.groups.drain()[0]
        versions = item.group.rollouts[0].completion.weight_versions
        return item.admitted_version, versions.tolist()

    assert act(world, scenario, num_steps=50) == (0, [0, 0, 4, 4])

import pytest

from pipeline_rl_jax.orchestrate.failures import StageFailure
from pipeline_rl_jax.orchestrate.flow import Flow
from pipeline_rl_jax.orchestrate.learning import Learner
from pipeline_rl_jax.orchestrate.stages import PreparedBatch
from pipeline_rl_jax.records import Group, Rollout
from pipeline_rl_jax.rollouts.groups import CollectedGroup
from pipeline_rl_jax.rollouts.staleness import LagBound
from tests.fakes.rollouts import make_completion
from tests.fakes.stages import FakePreprocess, FakeTraining, World, make_plan, rows
from tests.fakes.virtual_clock import run_virtual


def learn(world: World, scenario, *, max_lag: int = 2, beyond: str = "wait", version: int = 0):
    """Runs `scenario(flow, learner, admit)`; `admit` makes a finished group of versions."""
    world.training.version = version

    async def main():
        bound = LagBound(max_lag=max_lag, beyond=beyond)
        flow = Flow(world.stages, make_plan(num_steps=version + 10), bound=bound)

        def admit(*versions: list[int]) -> CollectedGroup:
            prompt = flow.stages.prompts.next()
            admitted = min(min(v) for v in versions)
            flow.account.admit(admitted)
            rollouts = [
                Rollout(
                    completion=make_completion(
                        prompt,
                        [10 * prompt.prompt_id + index] * len(v),
                        sample_index=index,
                        versions=v,
                    ),
                    reward=1.0,
                )
                for index, v in enumerate(versions)
            ]
            return CollectedGroup(
                group=Group(prompt=prompt, rollouts=tuple(rollouts)),
                order=prompt.prompt_id,
                admitted_version=admitted,
            )

        async with flow.running():
            return await scenario(flow, Learner(flow), admit)

    return run_virtual(main())


def test_a_batch_is_in_order_of_admission_whatever_order_it_came_in():
    async def scenario(flow, learner, admit):
        first, second = admit([0, 0], [0]), admit([0], [0])
        batch = await learner.prepare([second, first])
        return batch.version, batch.batch.token_ids[:, 0].tolist(), flow.account.next_version

    assert learn(World(), scenario) == (0, [0, 1, 10, 11], 1)


def test_a_step_trains_publishes_finishes_prompts_and_reports():
    world = World()

    async def scenario(flow, learner, admit):
        batch = await learner.prepare([admit([0], [0]), admit([0])])
        admit([0])
        await learner.step(batch, publish=True)
        return flow.trained_rollouts

    assert learn(world, scenario) == 3
    (report,) = world.observer.reports
    assert report.version == world.training.version == 1
    assert report.metrics == {"rows": 3, "lag/max_steps": 0}
    assert [group.prompt.prompt_id for group in report.groups] == [0, 1]
    assert (report.groups_out, report.groups_waiting) == (1, 0)
    assert world.publication.sent == [0, 1]
    assert world.prompts.num_unfinished == 1


def test_weights_stay_home_when_not_asked_for():
    world = World()

    async def scenario(flow, learner, admit):
        await learner.step(await learner.prepare([admit([0])]), publish=False)
        return list(world.publication.sent)

    assert learn(world, scenario) == [0]
    assert world.publication.sent == [0, 1]  # the end of the run sends them


def test_drop_gives_up_the_rollouts_beyond_the_bound_and_whole_groups_of_them():
    world = World()

    async def scenario(flow, learner, admit):
        old, mixed, young = admit([3, 4], [2]), admit([3, 6], [5, 6]), admit([6])
        batch = await learner.prepare([old, mixed, young])
        counts = [item.num_rollouts for item in batch.items]
        return counts, batch.batch.token_ids[:, 0].tolist(), flow.drops.counts, flow.account.num_out

    result = learn(world, scenario, beyond="drop", version=6)
    assert result == ([1, 1], [11, 20], {"beyond_max_lag": 3}, 0)


def test_drop_of_everything_is_no_batch():
    async def scenario(flow, learner, admit):
        batch = await learner.prepare([admit([3], [4])])
        return batch, flow.account.next_version, flow.account.num_out

    assert learn(World(), scenario, max_lag=1, beyond="drop", version=6) == (None, 6, 0)


def test_mask_takes_the_loss_from_old_tokens_and_tells_how_many():
    async def scenario(flow, learner, admit):
        batch = await learner.prepare([admit([3, 4, 5, 6])])
        return batch.batch.loss_mask.tolist(), batch.masked_tokens

    result = learn(World(), scenario, max_lag=1, beyond="mask", version=6)
    assert result == ([[False, False, True, True]], 2)


def test_wait_finds_a_token_that_should_not_be():
    async def scenario(flow, learner, admit):
        await learner.prepare([admit([3, 4])])

    with pytest.raises(
        StageFailure, match=r"generation: .*more than 2 steps older than the weights 6"
    ):
        learn(World(), scenario, version=6)


def test_what_the_preprocessor_leaves_out_is_counted_with_its_step():
    class Leaving(FakePreprocess):
        async def assemble(self, groups, version):
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            return PreparedBatch(batch=rows(rollouts[1:]), dropped={"truncated": 1}, metrics={})

    async def scenario(flow, learner, admit):
        batch = await learner.prepare([admit([0], [0], [0])])
        before = flow.drops.counts
        await learner.step(batch, publish=False)
        return before, flow.drops.counts, flow.trained_rollouts, batch.num_rollouts

    result = learn(World(preprocess=Leaving()), scenario)
    assert result == ({}, {"truncated": 1}, 2, 3)


def test_a_batch_of_which_nothing_is_left_is_dropped_for_the_reasons_given():
    class Empty(FakePreprocess):
        async def assemble(self, groups, version):
            return PreparedBatch(batch=None, dropped={"zero_variance": 2}, metrics={})

    async def scenario(flow, learner, admit):
        batch = await learner.prepare([admit([0], [0], [0])])
        return batch, flow.account.next_version, flow.drops.counts

    world = World(preprocess=Empty())
    assert learn(world, scenario) == (None, 0, {"zero_variance": 2, "batch_empty": 1})
    assert world.prompts.num_unfinished == 0


def test_only_batches_in_a_row_that_come_to_nothing_end_a_run():
    world = World(preprocess=FakePreprocess(empty=lambda version, groups: not useful))
    useful: list[bool] = []
    prepared = []

    async def scenario(flow, learner, admit):
        for _ in range(2):
            useful.clear()
            for _ in range(199):
                assert await learner.prepare([admit([0])]) is None
            useful.append(True)
            prepared.append(await learner.prepare([admit([0])]))
        useful.clear()
        for _ in range(200):
            await learner.prepare([admit([0])])

    with pytest.raises(StageFailure, match="preprocess: HopelessRun: 200 batches in a row"):
        learn(world, scenario)
    assert len(prepared) == 2


def test_steps_that_are_left_out_are_reported_and_then_end_the_run():
    class NotFinite(FakeTraining):
        async def train(self, batch):
            metrics = await super().train(batch)
            return {**metrics, "trainer/loss": float("nan"), "trainer/gradient_norm": 1.0}

    world = World(training=NotFinite())

    async def scenario(flow, learner, admit):
        for version in range(10):
            await learner.step(await learner.prepare([admit([version])]), publish=False)

    with pytest.raises(StageFailure, match="NaN or infinite in steps 1 to 5") as caught:
        learn(world, scenario)
    assert caught.value.stage == "training"
    assert [report.version for report in world.observer.reports] == [1, 2, 3, 4, 5]


def test_a_batch_for_other_weights_is_not_trained_on():
    world = World(training=FakeTraining())

    async def scenario(flow, learner, admit):
        batch = await learner.prepare([admit([0])])
        world.training.version = 5
        await learner.step(batch, publish=False)

    with pytest.raises(StageFailure, match=r"training: .* is at weight version 5, expected 0"):
        learn(world, scenario)

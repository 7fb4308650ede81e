"""`zero_variance = refill` in every schedule: full batches, no stall, no deadlock, nothing lost."""

import pytest

from pipeline_rl_jax.preprocess.refill import RefillRule
from pipeline_rl_jax.records import Group
from tests.fakes.settings import make_settings
from tests.fakes.stages import (
    FakeGeneration,
    FakePreprocess,
    FakeScoring,
    World,
    long_tailed,
    make_plan,
    run_schedule,
    unit,
)

BATCH_GROUPS, GROUP_SIZE = 3, 2
PLANS = {
    "conventional": {},
    "conventional, rounds of 4": {"name": "conventional", "steps_per_round": 4},
    "one_step_off": {"steps_per_round": 2},
    "pipeline": {},
    "pipeline, on policy": {"name": "pipeline", "max_lag": 0},
}


class Refilling(FakePreprocess):
    """Refuses by the product's rule."""

    def __init__(self, share: float) -> None:
        super().__init__()
        settings = make_settings(
            algorithm={
                "zero_variance": "refill",
                "max_refill_share": share,
                "group_size": GROUP_SIZE,
            },
            trainer={"batch_rollouts": BATCH_GROUPS * GROUP_SIZE},
        )
        self.rule = RefillRule(settings)
        self.num_refused = 0

    def refuse(self, group: Group) -> str | None:
        reason = self.rule.refuse(group)
        self.num_refused += reason is not None
        return reason


class Judging(FakeScoring):
    """Members of a group differ in reward with a given chance."""

    def __init__(self, useful_share: float, **rest) -> None:
        super().__init__(**rest)
        self.useful_share = useful_share

    async def score(self, completion):
        scored = await super().score(completion)
        if not hasattr(scored, "reward"):
            return scored
        useful = unit("useful", completion.prompt.prompt_id) < self.useful_share
        object.__setattr__(scored, "reward", float(useful and completion.sample_index == 0))
        return scored


def run(plan_name: str, *, useful_share: float, share: float, num_prompts=None, **scoring):
    world = World(
        generation=FakeGeneration(slots=5, length=long_tailed),
        scoring=Judging(useful_share, **scoring),
        preprocess=Refilling(share),
        num_prompts=num_prompts,
    )
    changes = dict(PLANS[plan_name])
    name = changes.pop("name", plan_name)
    plan = make_plan(batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, num_steps=12, **changes)
    report, _ = run_schedule(name, world, plan)
    assert report.admitted_rollouts == report.trained_rollouts + sum(report.dropped.values())
    assert report.dropped.get("zero_variance", 0) <= GROUP_SIZE * world.preprocess.num_refused
    return world, report


@pytest.mark.parametrize("plan_name", PLANS)
def test_every_batch_is_full_of_groups_that_teach(plan_name):
    world, report = run(plan_name, useful_share=0.4, share=50.0)
    assert (report.ended, report.version) == ("num_steps", 12)
    for step in world.observer.reports:
        assert len(step.groups) == BATCH_GROUPS
        assert all(len({r.reward for r in group.rollouts}) == 2 for group in step.groups)
    assert report.dropped["zero_variance"] > 0
    assert world.preprocess.rule.take_num_kept_unwillingly() == 0


@pytest.mark.parametrize("plan_name", PLANS)
def test_data_that_teaches_nothing_is_trained_on_at_the_price_of_the_cap(plan_name):
    world, report = run(plan_name, useful_share=0.0, share=2.0)
    assert (report.ended, report.version) == ("num_steps", 12)
    assert report.trained_rollouts == 12 * BATCH_GROUPS * GROUP_SIZE
    num_kept = world.preprocess.rule.take_num_kept_unwillingly()
    assert num_kept >= 12 * BATCH_GROUPS
    assert 0 < world.preprocess.num_refused <= 2 * (num_kept + BATCH_GROUPS)


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("useful_share", [0.0, 0.3])
def test_data_that_ends_ends_the_run(plan_name, useful_share):
    world, report = run(plan_name, useful_share=useful_share, share=50.0, num_prompts=23)
    assert report.ended == "data"
    assert report.admitted_rollouts == 23 * GROUP_SIZE
    assert world.prompts.num_unfinished < BATCH_GROUPS
    if not useful_share:
        assert report.version == 0
        assert report.dropped == {"zero_variance": 23 * GROUP_SIZE}


@pytest.mark.parametrize("plan_name", PLANS)
def test_a_group_that_lost_members_is_judged_by_what_is_left(plan_name):
    world, report = run(
        plan_name,
        useful_share=0.5,
        share=50.0,
        fails=lambda c: unit("fail", c.prompt.prompt_id, c.sample_index) < 0.3,
    )
    assert report.ended == "num_steps"
    sizes = {len(group.rollouts) for step in world.observer.reports for group in step.groups}
    assert sizes == {1, 2}  # one rollout has no variance: it is kept
    assert report.dropped["no_score"] > 0

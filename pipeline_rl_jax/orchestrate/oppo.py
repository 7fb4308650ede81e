"""OPPO's inter-step overlap: more prompts in flight than a step needs, the first to finish train.

Generation and training take turns. A step admits up to B + Δ groups, decodes until B of them are
finished and scored, trains on those, and lets the rest live on in their slots under the new
weights: they are deferred, by at most `schedule.overcommit.max_deferrals` steps. Δ follows the
slope of the reward. With Δ = 0 this is conventional RL with one optimizer step a round.
Source: OPPO, arXiv 2509.25762.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from pipeline_rl_jax.orchestrate.acting import Actor
from pipeline_rl_jax.orchestrate.flow import Flow, Plan
from pipeline_rl_jax.orchestrate.learning import Learner
from pipeline_rl_jax.orchestrate.stages import RunReport, Stages
from pipeline_rl_jax.rollouts.groups import CollectedGroup
from pipeline_rl_jax.rollouts.overcommit import OvercommitAccount
from pipeline_rl_jax.rollouts.overcommit_control import OvercommitController


async def run(stages: Stages, plan: Plan, *, stop: asyncio.Event | None = None) -> RunReport:
    """Until `plan.num_steps`, the end of the data or `stop`. Raises StageFailure."""
    controller = OvercommitController(
        variant=plan.overcommit.variant,
        start_groups=plan.overcommit.start_groups,
        min_groups=plan.overcommit.min_groups,
        max_groups=plan.overcommit.max_groups,
        change_groups=plan.overcommit.change_groups,
        window_steps=plan.overcommit.window_steps,
    )
    account = OvercommitAccount(
        batch_groups=plan.batch_groups,
        overcommit=controller.groups,
        max_deferrals=plan.overcommit.max_deferrals,
        next_version=stages.training.version,
        last_version=plan.num_steps,
    )
    flow = Flow(stages, plan, bound=account.bound, account=account, stop=stop)
    actor, learner = Actor(flow, horizon_name="overcommit"), Learner(flow)
    async with flow.running():
        while items := await _collect(flow, actor, account):
            with flow.waits.timing("generation", "trainer"):
                await _train(flow, learner, account, controller, items=items)
    return flow.report()


async def _collect(
    flow: Flow, actor: Actor, account: OvercommitAccount
) -> Sequence[CollectedGroup] | None:
    """Decodes until the first B groups have finished; the trainer waits. None at the run's end."""
    with flow.waits.timing("trainer", "rollouts"):
        weights = flow.stages.publication.latest()
        while not flow.ended and not account.complete:
            items = flow.groups.take_now(account.choose)
            if items is not None:
                return items
            if not await actor.turn(weights, horizon=account.horizon):
                return flow.groups.take_now(account.choose)
    return None


async def _train(
    flow: Flow,
    learner: Learner,
    account: OvercommitAccount,
    controller: OvercommitController,
    *,
    items: Sequence[CollectedGroup],
) -> None:
    """One optimizer step, and what it says about Δ; returns once generation has the weights."""
    batch = await learner.prepare(items)
    if batch is None:
        return
    metrics = {**account.metrics(), **controller.metrics()}
    await learner.step(batch.with_metrics(metrics), publish=True)
    rewards = [r.reward for item in batch.items for r in item.group.rollouts]
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if finite:
        account.overcommit = controller.observe(sum(finite) / len(finite))
    if not flow.ended:
        await flow.update_generation()

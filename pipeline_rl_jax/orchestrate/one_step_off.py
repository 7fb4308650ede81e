"""One step off: the next round is generated while this one is trained on.

A round is G batches (`schedule.optimizer_steps_per_round`) from weights that are frozen before the
training on the round before it: lag G to 2G - 1, in the first round 0 to G - 1. With
`schedule.overlap = False` the two take turns, lag 0 to G - 1.
"""

from __future__ import annotations

import asyncio

from pipeline_rl_jax.orchestrate.acting import Actor
from pipeline_rl_jax.orchestrate.flow import Flow, Plan
from pipeline_rl_jax.orchestrate.learning import Learner
from pipeline_rl_jax.orchestrate.rounds import (
    generate_round,
    split_round,
    train_and_generate,
    train_round,
)
from pipeline_rl_jax.orchestrate.stages import RunReport, Stages
from pipeline_rl_jax.rollouts.staleness import LagBound


async def run(stages: Stages, plan: Plan, *, stop: asyncio.Event | None = None) -> RunReport:
    """Until `plan.num_steps`, the end of the data or `stop`. Raises StageFailure."""
    rounds_at_once = 2 if plan.overlap else 1
    bound = LagBound(max_lag=rounds_at_once * plan.steps_per_round - 1, beyond="wait")
    flow = Flow(stages, plan, bound=bound, stop=stop)
    actor, learner = Actor(flow, horizon_name="round"), Learner(flow)
    async with flow.running():
        await generate_round(flow, actor)
        while batches := split_round(flow):
            if plan.overlap:
                await train_and_generate(flow, actor, learner, batches=batches)
            else:
                await train_round(flow, learner, batches)
            await generate_round(flow, actor)  # with overlap: what is missing, usually nothing
    return flow.report()

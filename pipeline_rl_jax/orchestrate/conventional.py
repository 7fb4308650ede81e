"""Conventional RL: generation and training take turns.

A round is G batches (`schedule.optimizer_steps_per_round`) from frozen weights and the G optimizer
steps on them. Slots are empty between rounds, where the new weights come in. Lag 0 to G - 1.
"""

from __future__ import annotations

import asyncio

from pipeline_rl_jax.orchestrate.acting import Actor
from pipeline_rl_jax.orchestrate.flow import Flow, Plan
from pipeline_rl_jax.orchestrate.learning import Learner
from pipeline_rl_jax.orchestrate.rounds import generate_round, split_round, train_round
from pipeline_rl_jax.orchestrate.stages import RunReport, Stages
from pipeline_rl_jax.rollouts.staleness import LagBound


async def run(stages: Stages, plan: Plan, *, stop: asyncio.Event | None = None) -> RunReport:
    """Until `plan.num_steps`, the end of the data or `stop`. Raises StageFailure."""
    bound = LagBound(max_lag=plan.steps_per_round - 1, beyond="wait")
    flow = Flow(stages, plan, bound=bound, stop=stop)
    actor, learner = Actor(flow, horizon_name="round"), Learner(flow)
    async with flow.running():
        await generate_round(flow, actor)
        while batches := split_round(flow):
            await train_round(flow, learner, batches)
            await generate_round(flow, actor)
    return flow.report()

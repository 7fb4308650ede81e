"""PipelineRL: generation never waits for a batch, the trainer never for a round.

Actor, preprocessor and trainer are coroutines joined by streams. The actor looks the newest weights
up at every chunk border, with its slots live; `schedule.max_lag` bounds how far they may be behind.
"""

from __future__ import annotations

import asyncio
import functools

from pipeline_rl_jax.orchestrate.acting import Actor
from pipeline_rl_jax.orchestrate.flow import Flow, Plan
from pipeline_rl_jax.orchestrate.learning import Learner, TrainingBatch
from pipeline_rl_jax.orchestrate.stages import RunReport, Stages
from pipeline_rl_jax.rollouts.staleness import LagBound
from pipeline_rl_jax.rollouts.stream import MemoryStream

_BATCHES_AHEAD = 1  # prepared while the trainer is busy; more would only close batches earlier


async def run(stages: Stages, plan: Plan, *, stop: asyncio.Event | None = None) -> RunReport:
    """Until `plan.num_steps`, the end of the data or `stop`. Raises StageFailure."""
    bound = LagBound(max_lag=plan.max_lag, beyond=plan.beyond_max_lag)
    flow = Flow(stages, plan, bound=bound, stop=stop)
    learner = Learner(flow)
    batches = flow.open_stream(producer="preprocess", consumer="trainer")
    async with flow.running():
        flow.start("generation", functools.partial(_act, flow))
        flow.start("preprocess", functools.partial(_prepare, flow, learner, batches))
        await _train(flow, learner, batches)
    return flow.report()


async def _act(flow: Flow) -> None:
    """Keeps the slots full, until the run ends or the data does."""
    actor = Actor(flow, horizon_name="max_lag", max_waiting_groups=flow.plan.stream_groups)
    while not flow.ended:
        weights = flow.stages.publication.latest()
        if await actor.turn(weights, horizon=weights.version + flow.plan.max_lag + 1):
            continue
        if flow.data_ended:
            break
        await actor.wait_for_change()
    flow.groups.close()


async def _prepare(flow: Flow, learner: Learner, batches: MemoryStream[TrainingBatch]) -> None:
    """Closes a batch as soon as the staleness rule lets it and the trainer could take it next."""
    while not flow.account.complete:
        if not await batches.wait_for_room(_BATCHES_AHEAD, whom="trainer"):
            break
        items = await flow.groups.take(flow.account.choose)
        if items is None:
            break
        batch = await learner.prepare(items)
        if batch is not None:
            batches.put(batch)
    batches.close()


async def _train(flow: Flow, learner: Learner, batches: MemoryStream[TrainingBatch]) -> None:
    """One optimizer step after the other; the weights leave after every n-th."""
    while (batch := await batches.get(whom="rollouts")) is not None:
        version = batch.version + 1
        await learner.step(batch, publish=version % flow.plan.publish_every_steps == 0)

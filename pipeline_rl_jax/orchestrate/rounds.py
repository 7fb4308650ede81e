"""Rounds: batches from frozen weights, buffered and shuffled, then trained on.

Owns the two halves of a round, taken in turns or at once. Which of these, is the schedule's to say.
"""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Iterable, Sequence

from pipeline_rl_jax.orchestrate.acting import Actor
from pipeline_rl_jax.orchestrate.flow import Flow
from pipeline_rl_jax.orchestrate.learning import Learner
from pipeline_rl_jax.orchestrate.stages import Weights
from pipeline_rl_jax.rollouts.groups import CollectedGroup

Batches = collections.deque[Sequence[CollectedGroup]]  # of one round, still to be trained on


async def generate_round(flow: Flow, actor: Actor) -> None:
    """Fills the buffer up to one round with the newest weights, while the trainer waits."""
    with flow.waits.timing("trainer", "rollouts"):
        weights = flow.stages.publication.latest()
        await _fill_buffer(flow, actor, weights, batches=collections.deque())


def split_round(flow: Flow) -> Batches:
    """Empties the buffer into shuffled batches; what fills no batch stays in it.

    Whole groups are shuffled, since advantages are taken within a group. The order depends on the
    seed and the version only: the buffer gives groups in order of admission. None at the run's end.
    """
    if flow.ended:
        return collections.deque()
    groups, size = flow.groups.drain(), flow.plan.batch_groups
    random.Random(f"{flow.plan.seed}/{flow.account.next_version}").shuffle(groups)
    num_full = len(groups) - len(groups) % size
    _put_back(flow, groups[num_full:])
    return collections.deque(groups[start : start + size] for start in range(0, num_full, size))


async def train_round(flow: Flow, learner: Learner, batches: Batches) -> None:
    """The optimizer steps of a round, while generation waits."""
    with flow.waits.timing("generation", "trainer"):
        await _train(flow, learner, batches)


async def train_and_generate(
    flow: Flow, actor: Actor, learner: Learner, *, batches: Batches
) -> None:
    """The optimizer steps of one round, and beside them the next round from today's weights."""
    weights = flow.stages.publication.latest()
    trained = asyncio.Event()

    async def generate_ahead() -> None:
        await _fill_buffer(flow, actor, weights, batches=batches)
        with flow.waits.timing("generation", "trainer"):
            await trained.wait()

    ahead = flow.start("generation", generate_ahead)
    await _train(flow, learner, batches)
    trained.set()
    with flow.waits.timing("trainer", "rollouts"):
        await ahead


async def _fill_buffer(flow: Flow, actor: Actor, weights: Weights, *, batches: Batches) -> None:
    """Up to one round of groups, to follow `batches`; ends with empty slots.

    The horizon is looked at anew at every turn, because a batch that comes to nothing moves it: the
    round after must not grow to make up for it, or its last groups would get too old.
    """
    while not flow.ended:
        horizon = flow.account.next_version + len(batches) + flow.plan.steps_per_round
        if not await actor.turn(weights, horizon=horizon):
            return


async def _train(flow: Flow, learner: Learner, batches: Batches) -> None:
    """One optimizer step for each batch; returns once the decode loop has the new weights."""
    while batches and not flow.ended:
        batch = await learner.prepare(batches.popleft())
        if batch is not None:
            await learner.step(batch, publish=not batches)
    if flow.ended:
        _put_back(flow, [item for items in batches for item in items])
    else:
        await flow.update_generation()


def _put_back(flow: Flow, items: Iterable[CollectedGroup]) -> None:
    """Into the buffer, from which the end of the run counts them."""
    for item in items:
        flow.groups.put(item)

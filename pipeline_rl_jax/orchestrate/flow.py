"""What all schedules share over one run: the stages, the accounts, the beginning and the end.

Owns the plan of a run, the state that its coroutines share, and how it ends: after the last step,
at the end of the data, at a stop request, or with the failure of a stage. The two halves of the
work are in `acting.py` and `learning.py`; when they run is each schedule's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Literal

from pipeline_rl_jax.orchestrate.failures import call, naming, one_failure
from pipeline_rl_jax.orchestrate.stages import RunReport, Stages
from pipeline_rl_jax.rollouts.drops import DropCounter, DropReason
from pipeline_rl_jax.rollouts.groups import CollectedGroup, GroupCollector
from pipeline_rl_jax.rollouts.staleness import LagAccount, LagBound
from pipeline_rl_jax.rollouts.stream import MemoryStream
from pipeline_rl_jax.rollouts.waits import Waits
from pipeline_rl_jax.settings import OvercommitSettings, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings that schedules read."""

    seed: int
    num_steps: int
    batch_groups: int  # groups of one optimizer step
    group_size: int
    max_lag: int  # pipeline: the setting; else what the schedule cannot exceed
    beyond_max_lag: Literal["wait", "drop", "mask"]
    stream_groups: int  # pipeline: finished groups at which admission stops
    publish_every_steps: int  # pipeline
    steps_per_round: int  # conventional, one_step_off
    overlap: bool  # one_step_off
    overcommit: OvercommitSettings  # oppo
    scores_in_flight: int
    deadline_seconds: float

    @classmethod
    def from_settings(cls, settings: Settings) -> Plan:
        schedule = settings.schedule
        batch_groups = settings.trainer.batch_rollouts // settings.algorithm.group_size
        return cls(
            seed=settings.seed,
            num_steps=schedule.num_steps,
            batch_groups=batch_groups,
            group_size=settings.algorithm.group_size,
            max_lag=schedule.max_lag,
            beyond_max_lag=schedule.beyond_max_lag,
            stream_groups=schedule.stream_groups or batch_groups,
            publish_every_steps=settings.publication.every_steps,
            steps_per_round=schedule.optimizer_steps_per_round,
            overlap=schedule.overlap,
            overcommit=schedule.overcommit,
            scores_in_flight=schedule.scores_in_flight,
            deadline_seconds=schedule.deadline_seconds,
        )


class Flow:
    """One run: what its coroutines share."""

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        *,
        bound: LagBound,
        account: LagAccount | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        """`stop`, once set, ends the run after the optimizer step that is being taken.

        `account` is for a schedule with a rule of its own on what may be out.
        """
        self.stages = stages
        self.plan = plan
        self.bound = bound
        self.waits = Waits(plan.deadline_seconds)
        self.drops = DropCounter()
        self.collector = GroupCollector()
        self.account = account or LagAccount(
            bound,
            batch_groups=plan.batch_groups,
            next_version=stages.training.version,
            last_version=plan.num_steps,
        )
        self.groups: MemoryStream[CollectedGroup] = MemoryStream(
            self.waits, producer="generation", consumer="preprocess", key=lambda item: item.order
        )
        self.changed = asyncio.Event()  # something that admission depends on
        self.ended = False  # nothing new is begun any more
        self.data_ended = False
        self.admitted_rollouts = 0
        self.trained_rollouts = 0
        self._stop = stop or asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._until_end: set[asyncio.Task[None]] = set()
        self._streams: list[MemoryStream[Any]] = [self.groups]
        self._published_version = -1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From the first publication to the last; the body is a schedule.

        The end of the body ends the run: streams are aborted, live samples cancelled, all of it
        counted. Raises StageFailure when any task fails, once the others have been cancelled.
        """
        async with one_failure(), self._tasks:
            await self.update_generation()
            self.start("stop", self._end_when_stopped, until_end=True)
            with naming("schedule"):
                yield
            self.end()
        self._count_leftovers()
        await self.update_generation()  # whoever evaluates next finds the last weights

    def start(
        self, stage: str, function: Callable[[], Awaitable[None]], *, until_end: bool = False
    ) -> asyncio.Task[None]:
        """Runs a coroutine beside the schedule; its failure is that of the run.

        The run's end waits for it, or with `until_end` cancels it.
        """

        async def named() -> None:
            with naming(stage):
                await function()

        task = self._tasks.create_task(named(), name=stage)
        if until_end:
            self._until_end.add(task)
            task.add_done_callback(self._until_end.discard)
        return task

    def open_stream(self, *, producer: str, consumer: str) -> MemoryStream[Any]:
        """A stream that the end of the run aborts."""
        stream: MemoryStream[Any] = MemoryStream(self.waits, producer=producer, consumer=consumer)
        self._streams.append(stream)
        return stream

    def end(self) -> None:
        """Nothing new is begun, what waits returns, what is being computed comes to its end."""
        self.ended = True
        for stream in self._streams:
            stream.abort()
        for task in self._until_end:
            task.cancel()
        self.changed.set()

    def publish_in_flight(self) -> None:
        """Sends the current weights on their way; decoding goes on with older ones meanwhile."""
        version = self._publish()
        self.start("publication", lambda: self._arrival(version))

    async def update_generation(self) -> None:
        """Returns once the current weights are what the decode loop finds."""
        if self._published_version != self.stages.training.version:
            self._publish()
        await self._arrival(self._published_version)

    def drop(self, item: CollectedGroup, reason: str) -> None:
        """A finished group leaves the run untrained; another prompt may take its place."""
        self.drops.count(reason, item.num_rollouts)
        self.account.release(item)
        self.finish_prompts([item])
        self.notify()

    def finish_prompts(self, items: Iterable[CollectedGroup]) -> None:
        """The prompts are used up: a resumed run passes them by."""
        with naming("data"):
            for item in items:
                self.stages.prompts.finish(item.group.prompt.prompt_id)

    def notify(self) -> None:
        """Rollouts have moved: admission and the closing of batches are to be looked at again.

        Whoever waits for a stream waits on, with its deadline set anew.
        """
        for stream in self._streams:
            stream.wake()
        self.changed.set()

    def report(self) -> RunReport:
        """How the run ended."""
        if self.stages.training.version >= self.plan.num_steps:
            ended = "num_steps"
        else:
            ended = "stopped" if self._stop.is_set() else "data"
        return RunReport(
            version=self.stages.training.version,
            ended=ended,
            admitted_rollouts=self.admitted_rollouts,
            trained_rollouts=self.trained_rollouts,
            dropped=self.drops.counts,
            waited_seconds=self.waits.seconds,
        )

    def _publish(self) -> int:
        version = self.stages.training.version
        with naming("publication"):
            self.stages.publication.publish(version)
        self._published_version = version
        return version

    async def _arrival(self, version: int) -> None:
        await call(self.waits, "publication", self.stages.publication.wait_for(version))
        self.changed.set()

    async def _end_when_stopped(self) -> None:
        await self._stop.wait()
        self.end()

    def _count_leftovers(self) -> None:
        with naming("generation"):
            self.stages.generation.cancel_all()
        with naming("scoring"):
            self.stages.scoring.forget_all()
        came_back, still_out = self.collector.abandon()
        left = [item for stream in self._streams for item in stream.drain()]
        self.drops.count(DropReason.CANCELLED, still_out)
        self.drops.count(
            DropReason.LEFT_AT_END, came_back + sum(item.num_rollouts for item in left)
        )

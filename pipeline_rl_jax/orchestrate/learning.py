"""The learning half of every schedule: finished groups in, optimizer steps out.

Owns the preparation of one batch, under the rule for tokens beyond max_lag, and one optimizer step
with everything that follows from it. When weights leave is the schedule's to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pipeline_rl_jax.orchestrate.failures import HopelessRun, StageFailure, call, naming
from pipeline_rl_jax.orchestrate.finite_steps import FiniteSteps
from pipeline_rl_jax.orchestrate.flow import Flow
from pipeline_rl_jax.orchestrate.stages import PreparedBatch, StepReport
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.rollouts.drops import DropReason
from pipeline_rl_jax.rollouts.groups import CollectedGroup

_MAX_EMPTY_BATCHES = 200  # in a row, before a run that only generates is called stalled


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """A batch and the groups in it, which it stands for until it has been trained on."""

    version: int  # of the weights that train it
    batch: PackedBatch
    items: Sequence[CollectedGroup]
    num_trained: int  # rollouts in the batch
    dropped: Mapping[str, int]  # rollouts of its groups that are not
    masked_tokens: int
    metrics: Mapping[str, float]

    def with_metrics(self, metrics: Mapping[str, float]) -> TrainingBatch:
        """The same with metrics of the schedule's own beside the preprocessor's."""
        return dataclasses.replace(self, metrics={**self.metrics, **metrics})

    @property
    def num_rollouts(self) -> int:
        return self.num_trained + sum(self.dropped.values())


class Learner:
    """Prepares batches and takes optimizer steps."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._num_empty = 0
        self._finite_steps = FiniteSteps()

    async def prepare(self, items: Sequence[CollectedGroup]) -> TrainingBatch | None:
        """The batch of the next version, in order of admission whatever the order of `items`.

        None when nothing in it can be trained on: its groups are dropped, the version stays next.
        """
        flow = self._flow
        items = self._keep_fresh(sorted(items, key=lambda item: item.order))
        if not items:
            return None
        groups = [item.group for item in items]
        version = flow.account.close_batch(items)
        flow.notify()  # admission may go on
        with naming("generation"):
            flow.bound.check(groups, version)
        prepared = await call(
            flow.waits, "preprocess", flow.stages.preprocess.assemble(groups, version)
        )
        num_trained = sum(item.num_rollouts for item in items) - sum(prepared.dropped.values())
        if prepared.batch is None:
            self._drop_batch(items, prepared, num_unexplained=num_trained)
            return None
        self._num_empty = 0
        batch, masked_tokens = flow.bound.mask(prepared.batch, version)
        return TrainingBatch(
            version=version,
            batch=batch,
            items=items,
            num_trained=num_trained,
            dropped=prepared.dropped,
            masked_tokens=masked_tokens,
            metrics=prepared.metrics,
        )

    async def step(self, batch: TrainingBatch, *, publish: bool) -> None:
        """One optimizer step, its weights sent on their way if asked for, its observers."""
        flow, training = self._flow, self._flow.stages.training
        _check_version(training.version, batch.version)
        metrics = await call(flow.waits, "training", training.train(batch.batch))
        _check_version(training.version, batch.version + 1)
        flow.trained_rollouts += batch.num_trained
        self._count(batch.dropped)
        flow.finish_prompts(batch.items)
        if publish:
            flow.publish_in_flight()
        report = StepReport(
            version=training.version,
            groups=[item.group for item in batch.items],
            metrics={**batch.metrics, **metrics},
            masked_tokens=batch.masked_tokens,
            waited_seconds=flow.waits.take_seconds(),
            dropped=flow.drops.counts,
            groups_waiting=len(flow.groups),
            groups_out=flow.account.num_out,
        )
        await call(flow.waits, "observer", flow.stages.observer.after_step(report))
        with naming("training"):  # after it has been reported, as the others were
            self._finite_steps.add(report.version, report.metrics)

    def _keep_fresh(self, items: Sequence[CollectedGroup]) -> list[CollectedGroup]:
        """The groups without what `beyond_max_lag = "drop"` gives up."""
        flow, version = self._flow, self._flow.account.next_version
        fresh = []
        for item in items:
            kept = flow.bound.keep(item.group, version)
            if kept.rollouts:
                flow.drops.count(DropReason.BEYOND_MAX_LAG, item.num_rollouts - len(kept.rollouts))
                fresh.append(dataclasses.replace(item, group=kept))
            else:
                flow.drop(item, DropReason.BEYOND_MAX_LAG)
        return fresh

    def _drop_batch(
        self, items: Sequence[CollectedGroup], prepared: PreparedBatch, *, num_unexplained: int
    ) -> None:
        flow = self._flow
        self._count({**prepared.dropped, DropReason.BATCH_EMPTY: num_unexplained})
        flow.account.reopen_batch()
        flow.finish_prompts(items)
        flow.notify()
        self._num_empty += 1
        if self._num_empty == _MAX_EMPTY_BATCHES:
            raise StageFailure(
                "preprocess",
                HopelessRun(
                    f"{_MAX_EMPTY_BATCHES} batches in a row held nothing to train on, dropped so "
                    f"far: {dict(flow.drops.counts)}; make the task easier, the group larger, or "
                    "keep more (algorithm.zero_variance, algorithm.truncated)"
                ),
            )

    def _count(self, dropped: Mapping[str, int]) -> None:
        for reason, num_rollouts in dropped.items():
            self._flow.drops.count(reason, num_rollouts)


def _check_version(version: int, expected: int) -> None:
    if version != expected:
        raise StageFailure(
            "training",
            RuntimeError(f"the trainer is at weight version {version}, expected {expected}"),
        )

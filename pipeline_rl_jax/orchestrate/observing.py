"""What a person and a disk see of a run: metrics, progress, samples, evaluations, checkpoints.

Owns what happens after each optimizer step besides training. Nothing here drives the run.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pipeline_rl_jax.evaluation.greedy import Evaluation
from pipeline_rl_jax.generation.batcher import BatcherCounts
from pipeline_rl_jax.orchestrate.finite_steps import is_finite_step
from pipeline_rl_jax.orchestrate.stages import StepReport
from pipeline_rl_jax.orchestrate.totals import RunTotals
from pipeline_rl_jax.orchestrate.utilisation import Utilisation
from pipeline_rl_jax.preprocess.provenance import lag_statistics
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.telemetry.process import CompilationCounter, resident_bytes
from pipeline_rl_jax.telemetry.progress import Progress, ProgressReport
from pipeline_rl_jax.telemetry.samples import SampleWriter
from pipeline_rl_jax.telemetry.spans import span, take_span_totals
from pipeline_rl_jax.telemetry.writer import MetricWriter

Metrics = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outlets:
    """Where an observer reports to."""

    writer: MetricWriter
    progress: Progress
    samples: SampleWriter


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Hooks:
    """What an observer can ask the run for."""

    generation_counts: Callable[[], BatcherCounts]
    gauges: Callable[[], Metrics]  # publication, data and reward counters, as metrics
    adapt_chunks: Callable[..., Metrics]  # to a step's `seconds` and decoded `num_tokens`
    utilisation: Utilisation | None  # None = not asked for
    evaluate: Callable[[], Awaitable[Evaluation]]
    save: Callable[[int, Mapping[str, Any]], None]  # version, what `RunTotals.restore` takes


class RunObserver:
    """Implements `stages.Observer`."""

    def __init__(
        self, settings: Settings, totals: RunTotals, *, outlets: Outlets, hooks: Hooks
    ) -> None:
        self._settings = settings
        self._totals = totals
        self._outlets = outlets
        self._hooks = hooks
        self._saved_version: int | None = None
        self._is_finite = True  # the newest step
        self._compilations = CompilationCounter()
        self.start_clock()

    def start_clock(self) -> None:
        """Training begins, or goes on, now: what came before is not counted."""
        self._last_seconds = time.monotonic()
        self._last_counts = copy.copy(self._hooks.generation_counts())
        take_span_totals()

    def close(self) -> None:
        self._compilations.close()

    async def after_step(self, report: StepReport) -> None:
        elapsed, counts = self._take_elapsed()
        self._is_finite = is_finite_step(report.metrics)
        self._totals.add_step(report.groups, report.metrics)
        metrics = {
            **report.metrics,
            **self._step_metrics(report, counts, elapsed_seconds=elapsed),
            **lag_statistics(report.groups, trained_version=report.version - 1),
            **self._hooks.gauges(),
            **self._hooks.adapt_chunks(seconds=elapsed, num_tokens=counts.decoded_tokens),
            **take_span_totals().metrics(),
        }
        self._outlets.writer.write(report.version, metrics)
        rollouts = [rollout for group in report.groups for rollout in group.rollouts]
        self._outlets.samples.write(report.version, rollouts)
        if self._due(self._settings.evaluation.every_steps, report.version):
            await self.evaluate(report.version)
        self._outlets.progress.update(self._progress(report, metrics, elapsed_seconds=elapsed))
        if self._due(self._settings.checkpointing.every_steps, report.version):
            self.save(report.version)

    async def evaluate(self, version: int) -> Evaluation:
        """Runs the evaluation set with the newest published weights and records the result."""
        self._outlets.progress.note(f"evaluating at step {version}")
        with span("evaluate", track="evaluation"):
            evaluation = await self._hooks.evaluate()
        self._totals.add_evaluation(evaluation, is_first=version == 0)
        self._outlets.writer.write(version, evaluation.metrics())
        found = f"mean reward {evaluation.mean_reward:.4g}"
        if evaluation.accuracy is not None:
            right = round(evaluation.accuracy * evaluation.num_prompts)
            found = f"{right} of {evaluation.num_prompts} right"
        self._outlets.progress.note(f"step {version}: {found} (greedy)")
        return evaluation

    def save(self, version: int) -> bool:
        """Starts a checkpoint of this version, unless there is one.

        None, and False, after a step that was not finite: it would take the place of a good one.
        """
        if not self._is_finite:
            self._outlets.progress.note(
                f"no checkpoint of step {version}: its loss or gradient was not finite"
            )
            return False
        if version != self._saved_version:
            with span("checkpoint"):
                self._hooks.save(version, dataclasses.asdict(self._totals))
            self._saved_version = version
        return True

    def _take_elapsed(self) -> tuple[float, BatcherCounts]:
        """Seconds since the last step's end, and how the decode loop's counts grew meanwhile."""
        now, counts = time.monotonic(), copy.copy(self._hooks.generation_counts())
        elapsed, before = now - self._last_seconds, self._last_counts
        self._totals.add_generation(before, counts, seconds=elapsed)
        self._last_seconds, self._last_counts = now, counts
        grown = {
            field.name: getattr(counts, field.name) - getattr(before, field.name)
            for field in dataclasses.fields(BatcherCounts)
        }
        return elapsed, BatcherCounts(**grown)

    def _step_metrics(
        self, report: StepReport, counts: BatcherCounts, *, elapsed_seconds: float
    ) -> dict[str, float]:
        totals = self._totals
        waits = report.waited_seconds
        return {
            **self._utilisation(report, counts),
            "trainer/step_seconds": elapsed_seconds,
            "trainer/samples_per_second": report.metrics.get("batch/rollouts", 0.0)
            / elapsed_seconds,
            "trainer/idle_share": _waited_share(waits, "trainer", elapsed_seconds),
            "generation/idle_share": _waited_share(waits, "generation", elapsed_seconds),
            "generation/tokens_per_second": counts.decoded_tokens / max(counts.busy_seconds, 1e-9),
            "generation/busy_slots_share": counts.decoded_tokens / max(1, counts.slot_steps),
            "publication/inflight_updates": float(totals.inflight_updates),
            "publication/version": float(report.version),
            "rollouts/queued_groups": float(report.groups_waiting),
            "rollouts/out_groups": float(report.groups_out),
            "lag/masked_tokens": float(report.masked_tokens),
            "run/samples": float(totals.samples),
            "run/train_seconds": totals.train_seconds,
            "host/memory_bytes": float(resident_bytes()),
            "host/compilations": float(self._compilations.count),
            **{f"drops/{name}_total_rollouts": float(n) for name, n in report.dropped.items()},
            **{
                f"waits/{_snake(who)}_for_{_snake(whom)}_seconds": seconds
                for (who, whom), seconds in waits.items()
            },
        }

    def _utilisation(self, report: StepReport, counts: BatcherCounts) -> dict[str, float]:
        utilisation, busy = self._hooks.utilisation, report.metrics.get("trainer/busy_seconds")
        if utilisation is None or busy is None:
            return {}
        num_tokens = counts.decoded_tokens + counts.prefilled_tokens
        return {
            "trainer/flops_utilisation_share": utilisation.trainer(report.groups, busy),
            "generation/flops_utilisation_share": utilisation.generation(
                num_tokens, counts.busy_seconds
            ),
        }

    def _progress(
        self, report: StepReport, metrics: Metrics, *, elapsed_seconds: float
    ) -> ProgressReport:
        nan = float("nan")
        return ProgressReport(
            step=report.version,
            num_steps=self._settings.schedule.num_steps,
            reward_mean=metrics.get("reward/mean", nan),
            accuracy=self._totals.accuracy_after,
            lag_mean_steps=metrics.get("lag/mean_steps", nan),
            lag_max_steps=metrics.get("lag/max_steps", nan),
            decode_tokens_per_second=metrics["generation/tokens_per_second"],
            train_tokens_per_second=metrics.get("trainer/tokens_per_second", nan),
            trainer_wait_share=_waited_share(report.waited_seconds, "trainer", elapsed_seconds),
            generation_wait_share=_waited_share(
                report.waited_seconds, "generation", elapsed_seconds
            ),
        )

    def _due(self, every_steps: int, version: int) -> bool:
        """Every n-th step, but not the last: the end of the run sees to that one itself."""
        is_last = version >= self._settings.schedule.num_steps
        return every_steps > 0 and version % every_steps == 0 and not is_last


def _waited_share(
    waits: Mapping[tuple[str, str], float], waiting: str, elapsed_seconds: float
) -> float:
    """Of the time between two steps. The waits of slots that stayed empty are known at the end of
    their chunk, which may have begun in the step before: at most 1 all the same."""
    seconds = sum(seconds for (who, _), seconds in waits.items() if who == waiting)
    return min(1.0, seconds / elapsed_seconds)


def _snake(words: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in words).strip("_").replace("__", "_")

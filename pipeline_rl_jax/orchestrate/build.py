"""The composition root: settings in, a whole run out.

Owns the order of things around a schedule: build, restore or start, evaluate, train, evaluate,
save, sum up. The parts come from `parts.py`; `plan_text.py` tells what would be done.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from pipeline_rl_jax.checkpointing.store import CheckpointStore
from pipeline_rl_jax.evaluation.greedy import Evaluation, GreedyEvaluator
from pipeline_rl_jax.models.loading import initial_params
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.orchestrate import conventional, one_step_off, oppo, pipeline, plan_text
from pipeline_rl_jax.orchestrate.chunk_sizing import ChunkSizing
from pipeline_rl_jax.orchestrate.device_stages import (
    BatchPreprocess,
    DevicePublication,
    EngineGeneration,
    MeshTraining,
    RewardScoring,
)
from pipeline_rl_jax.orchestrate.failures import HopelessRun, StageFailure
from pipeline_rl_jax.orchestrate.finite_steps import StepsLeftOut
from pipeline_rl_jax.orchestrate.flow import Plan
from pipeline_rl_jax.orchestrate.frozen_models import FrozenModels, load_frozen_models
from pipeline_rl_jax.orchestrate.observing import Hooks, Outlets, RunObserver
from pipeline_rl_jax.orchestrate.parts import Parts, build_parts
from pipeline_rl_jax.orchestrate.scoring_measures import ScoringMeasures
from pipeline_rl_jax.orchestrate.stages import RunReport, Stages
from pipeline_rl_jax.orchestrate.threads import StageThread
from pipeline_rl_jax.orchestrate.totals import RunTotals
from pipeline_rl_jax.orchestrate.utilisation import Utilisation, measure_utilisation
from pipeline_rl_jax.settings import Settings, SettingsError, settings_errors
from pipeline_rl_jax.telemetry.profile import ProfileWindow
from pipeline_rl_jax.telemetry.progress import Progress, open_progress, print_line
from pipeline_rl_jax.telemetry.samples import SampleWriter
from pipeline_rl_jax.telemetry.spans import timeline_file
from pipeline_rl_jax.telemetry.summary import format_summary, write_summary
from pipeline_rl_jax.telemetry.workdir import (
    Workdir,
    alone_in,
    disk_errors,
    write_config,
)
from pipeline_rl_jax.telemetry.writer import open_writer
from pipeline_rl_jax.trainer.state import TrainState, abstract_state, create_state

_SCHEDULES = {
    "conventional": conventional.run,
    "one_step_off": one_step_off.run,
    "pipeline": pipeline.run,
    "oppo": oppo.run,
}


def describe(settings: Settings) -> str:
    """What `--dry_run` prints. Reads config.json and tokenizer; makes and moves nothing.

    Except that a model which is made on the spot (`model_source.py`) is made, if it is not yet.
    """
    with settings_errors():
        return plan_text.describe(settings)


def run(settings: Settings, *, workdir: Workdir) -> int:
    """Trains to `schedule.num_steps`, resuming what `workdir` holds. Returns the exit code.

    0 at the end of the run or of the data; 128 + n after signal n, with a checkpoint from which
    the same command goes on. Raises `SettingsError` for what the user can mend, `StageFailure`
    for a stage that failed.
    """
    progress = open_progress(settings.telemetry.progress)
    with contextlib.ExitStack() as stack:
        stack.enter_context(disk_errors(workdir))
        stack.enter_context(alone_in(workdir))
        stack.callback(progress.close)
        with settings_errors():
            progress.note(f"loading {settings.model.source}")
            parts = build_parts(settings)
            evaluator = parts.make_evaluator() if _evaluates(settings) else None
            checkpoints = CheckpointStore(workdir.checkpoints, settings)
            stack.callback(checkpoints.close)
            state, resumed = _restore_or_start(parts, checkpoints)
            frozen = load_frozen_models(parts, state)
        write_config(workdir, settings)
        first_step = resumed["version"] + 1 if resumed else 0
        writer = open_writer(workdir, settings.telemetry, first_step=first_step)
        stack.callback(writer.close)
        if settings.telemetry.timeline:
            stack.enter_context(timeline_file(workdir.timeline))
        profile = ProfileWindow(settings.profile, workdir.profile)
        stack.callback(profile.close)
        session = Session(
            parts,
            state,
            frozen=frozen,
            evaluator=evaluator,
            checkpoints=checkpoints,
            profile=profile,
            outlets=Outlets(
                writer=writer,
                progress=progress,
                samples=SampleWriter(settings.telemetry, workdir.samples),
            ),
            totals=RunTotals.restore(resumed["totals"]) if resumed else RunTotals(),
            snapshots=resumed or {},
        )
        with _errors_to_mend(checkpoints):
            exit_code = asyncio.run(session.run())
    summary = session.summary()
    write_summary(workdir, summary)
    print_line(format_summary(summary).removesuffix("\n"))
    return exit_code


class Session:
    """One attempt at a run: the stages, and what happens before and after the schedule."""

    def __init__(
        self,
        parts: Parts,
        state: TrainState,
        *,
        frozen: FrozenModels,
        evaluator: GreedyEvaluator | None,
        checkpoints: CheckpointStore,
        profile: ProfileWindow,
        outlets: Outlets,
        totals: RunTotals,
        snapshots: Mapping[str, Any],
    ) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._checkpoints = checkpoints
        self._progress: Progress = outlets.progress
        self._totals = totals
        self._threads = {
            name: StageThread(name) for name in ("generation", "training", "preprocess")
        }
        self._trainer = parts.make_trainer(state)
        self._trainer.restore(snapshots.get("trainer", {}))
        self._frozen = frozen
        self._scoring_measures = ScoringMeasures(frozen, parts.meshes)
        self._batcher = parts.make_batcher(emit_chunks=bool(frozen.readers.names))
        self._chunk_sizing = ChunkSizing(self._batcher, parts.settings.generation)
        self._chunk_sizing.restore(snapshots.get("chunk_size", {}))
        self._evaluator = evaluator
        self._channel = parts.make_channel()
        self._publication = DevicePublication(
            self._channel, parts.store, trainer=self._trainer, order=parts.order
        )
        hooks = Hooks(
            generation_counts=lambda: self._batcher.counts,
            gauges=self._gauges,
            adapt_chunks=self._chunk_sizing.after_step,
            utilisation=_measure(parts),
            evaluate=self._evaluate,
            save=self._save,
        )
        self._observer = RunObserver(parts.settings, totals, outlets=outlets, hooks=hooks)
        self._stages = self._make_stages(profile)
        self._stop_signal: int | None = None
        self._stop = asyncio.Event()

    def summary(self):
        """The figures of the run so far."""
        version = self._trainer.version
        finished = version >= self._settings.schedule.num_steps
        return self._totals.summary(version=version, finished=finished)

    async def run(self) -> int:
        """Everything from the first evaluation to the last checkpoint. Returns the exit code."""
        async with self._signals():
            try:
                await self._before()
                report = await self._train()
                await self._after(report)
            except StageFailure as failure:
                if failure.stage != "training":
                    self._observer.save(self._trainer.version)  # nothing that was paid for is lost
                raise
            finally:
                self._observer.close()
                await self._parts.scorer.close()
                await self._frozen.readers.close()
        self._channel.close()
        return 0 if self._stop_signal is None else 128 + self._stop_signal

    async def _before(self) -> None:
        await self._publish_now()
        evaluation = self._settings.evaluation
        if self._trainer.version == 0 and evaluation.at_start and self._evaluator:
            await self._observer.evaluate(0)

    async def _train(self) -> RunReport:
        schedule = self._settings.schedule
        steps = f"{self._trainer.version} to {schedule.num_steps}"
        verb = "resuming" if self._trainer.version else "training"
        self._progress.note(f"{verb} with {schedule.name}, steps {steps}")
        self._observer.start_clock()
        self._scoring_measures.take_metrics()  # an evaluation before is not counted
        return await _SCHEDULES[schedule.name](
            self._stages, Plan.from_settings(self._settings), stop=self._stop
        )

    async def _after(self, report: RunReport) -> None:
        if report.ended == "data":
            self._progress.note(
                f"the data ended at step {report.version} of {self._settings.schedule.num_steps} "
                "(data.num_epochs)"
            )
        stopped = self._stop_signal is not None
        evaluation = self._settings.evaluation
        if evaluation.at_end and self._evaluator and not stopped:
            await self._observer.evaluate(report.version)
        is_saved = False
        if self._settings.checkpointing.at_end or stopped:
            is_saved = self._observer.save(report.version)
        if stopped and is_saved:
            self._progress.note(
                f"stopped at step {report.version}; the same command again resumes there"
            )

    async def _publish_now(self) -> None:
        self._publication.publish(self._trainer.version)
        await self._publication.wait_for(self._trainer.version)

    async def _evaluate(self) -> Evaluation:
        assert self._evaluator is not None
        thread = self._threads["generation"]
        completions = await thread.run(
            lambda: self._evaluator.decode(self._parts.store.latest())  # type: ignore[union-attr]
        )
        return await self._evaluator.grade(completions)

    def _save(self, version: int, totals: Mapping[str, Any]) -> None:
        self._checkpoints.save(
            self._trainer.state,
            {
                "version": version,
                "totals": dict(totals),
                "prompts": self._parts.prompts.snapshot(),
                "trainer": self._trainer.snapshot(),
                "chunk_size": self._chunk_sizing.snapshot(),
            },
        )

    def _gauges(self) -> dict[str, float]:
        counters = self._parts.scorer.counters
        return {
            **self._channel.take_metrics(),
            **self._scoring_measures.take_metrics(),
            "data/too_long_prompts": float(self._parts.prompts.num_dropped),
            **{f"rewards/{name}_completions": float(n) for name, n in counters.items()},
        }

    def _make_stages(self, profile: ProfileWindow) -> Stages:
        parts, threads = self._parts, self._threads
        return Stages(
            prompts=parts.prompts,
            generation=EngineGeneration(self._batcher, threads["generation"]),
            scoring=RewardScoring(parts.scorer, self._frozen.readers),
            preprocess=BatchPreprocess(
                parts.settings, threads["preprocess"], reference=self._frozen.reference
            ),
            training=MeshTraining(
                self._trainer,
                threads["training"],
                profile=profile,
                order=parts.order,
                critic=self._frozen.critic,
            ),
            publication=self._publication,
            observer=self._observer,
        )

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        """The first Ctrl-C or SIGTERM ends the run in order, the second one at once."""
        loop = asyncio.get_running_loop()
        caught = (signal.SIGINT, signal.SIGTERM)

        def stop(number: int) -> None:
            self._stop_signal = number
            self._stop.set()
            self._progress.note("stopping after this step; once more to stop at once")
            for each in caught:
                loop.remove_signal_handler(each)

        for number in caught:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)


def _restore_or_start(
    parts: Parts, checkpoints: CheckpointStore
) -> tuple[TrainState, Mapping[str, Any] | None]:
    """The newest checkpoint's state and metadata, or a fresh state and None."""
    settings, config, mesh = parts.settings, parts.config, parts.meshes.trainer
    dtype, value_head = settings.model.param_dtype, settings.algorithm.learns_values
    wanted = abstract_state(
        parts.optimizer, config=config, mesh=mesh, param_dtype=dtype, value_head=value_head
    )
    if parts.critic is not None:
        critic = parts.critic.abstract_state(settings, mesh=parts.meshes.critic)
        wanted = dataclasses.replace(wanted, critic=critic)
    restored = checkpoints.restore_latest(wanted)
    if restored is not None:
        parts.prompts.restore(restored.metadata["prompts"])
        return restored.state, restored.metadata
    params = initial_params(
        parts.model_directory,
        config,
        settings.model,
        shardings=param_shardings(config, mesh),
        seed=settings.seed,
    )
    state = create_state(params, parts.optimizer, config=config, mesh=mesh, value_head=value_head)
    if parts.critic is not None:
        critic = parts.critic.initial_state(settings, mesh=parts.meshes.critic)
        state = dataclasses.replace(state, critic=critic)
    return state, None


def _measure(parts: Parts) -> Utilisation | None:
    if not parts.settings.telemetry.flops_utilisation:
        return None
    return measure_utilisation(parts.config, parts.settings, parts.meshes)


def _evaluates(settings: Settings) -> bool:
    evaluation = settings.evaluation
    return bool(evaluation.at_start or evaluation.at_end or evaluation.every_steps)


@contextlib.contextmanager
def _errors_to_mend(checkpoints: CheckpointStore) -> Iterator[None]:
    """What is found in the middle of a run may be the user's to mend, too."""
    try:
        yield
    except StageFailure as failure:
        cause = failure.cause
        if failure.stage == "data" and isinstance(cause, ValueError):
            problem = str(cause)
        elif isinstance(cause, StepsLeftOut):
            problem = f"{cause}; {_last_good(checkpoints.versions, cause.first_version)}"
        elif isinstance(cause, HopelessRun):
            problem = str(cause)
        else:
            raise
        raise SettingsError(" ".join(problem.split())) from failure


def _last_good(versions: Sequence[int], first_left_out: int) -> str:
    """Which checkpoint to go back to, when steps from `first_left_out` on were left out.

    The weights that were tried in vain are those before it: its own checkpoint may be whole, but
    it is not known to be good.
    """
    tried = first_left_out - 1
    good = [version for version in versions if version < tried]
    text = f"the last good checkpoint is that of step {max(good)}" if good else ""
    if tried in versions:
        text = (
            f"{text}, " if good else ""
        ) + f"step {tried} has the weights that were tried in vain"
        return text + (": move that one away to go back" if good else ", and there is no other")
    return text or "there is no checkpoint to go back to"

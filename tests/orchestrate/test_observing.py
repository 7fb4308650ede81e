"""What is reported after a step, and when evaluations and checkpoints are due."""

import asyncio
import dataclasses
import math

import pytest

from pipeline_rl_jax.evaluation.greedy import Evaluation
from pipeline_rl_jax.generation.batcher import BatcherCounts
from pipeline_rl_jax.orchestrate.observing import Hooks, Outlets, RunObserver
from pipeline_rl_jax.orchestrate.stages import StepReport
from pipeline_rl_jax.orchestrate.totals import RunTotals
from pipeline_rl_jax.orchestrate.utilisation import Utilisation
from pipeline_rl_jax.telemetry.progress import SilentProgress
from pipeline_rl_jax.telemetry.samples import SampleWriter
from pipeline_rl_jax.telemetry.schema import check_names
from tests.fakes.rollouts import make_group
from tests.fakes.settings import make_settings
from tests.fakes.tiny_engine import TINY


class Recorder(SilentProgress):
    """Writer, progress and hooks in one."""

    def __init__(self):
        self.lines, self.saved, self.reports, self.notes = [], [], [], []
        self.counts = BatcherCounts()
        self.accuracy = 0.25

    def write(self, step, metrics):
        check_names(metrics)
        self.lines.append((step, dict(metrics)))

    def update(self, report):
        self.reports.append(report)

    def note(self, text):
        self.notes.append(text)

    async def evaluate(self):
        return Evaluation(
            num_prompts=8,
            accuracy=self.accuracy,
            mean_reward=0.5,
            mean_tokens=3.0,
            truncated_share=0.0,
        )

    def save(self, version, totals):
        self.saved.append((version, totals["samples"]))


def make_observer(tmp_path, **sections):
    recorder = Recorder()
    settings = make_settings(schedule={"num_steps": 4}, **sections)
    observer = RunObserver(
        settings,
        RunTotals(),
        outlets=Outlets(
            writer=recorder,
            progress=recorder,
            samples=SampleWriter(settings.telemetry, tmp_path),
        ),
        hooks=Hooks(
            generation_counts=lambda: recorder.counts,
            gauges=dict,
            adapt_chunks=lambda **_: {},
            utilisation=Utilisation(TINY, trainer_peak=1e9, generation_peak=1e9),
            evaluate=recorder.evaluate,
            save=recorder.save,
        ),
    )
    return observer, recorder


def report(version, **waits):
    return StepReport(
        version=version,
        groups=[make_group(0, [0.0, 1.0])],
        metrics={"batch/rollouts": 2.0, "reward/mean": 0.5, "trainer/busy_seconds": 0.5},
        masked_tokens=0,
        waited_seconds=waits.get("waits", {}),
        dropped={"cancelled": 3},
        groups_waiting=1,
        groups_out=2,
    )


def test_each_step_is_written_under_its_own_number(tmp_path):
    observer, recorder = make_observer(tmp_path, checkpointing={"every_steps": 0})
    recorder.counts.decoded_tokens = 30
    recorder.counts.slot_steps = 40
    waits = {("generation", "trainer (max_lag)"): 1e-9, ("trainer", "rollouts"): 1e-9}
    asyncio.run(observer.after_step(report(1, waits=waits)))
    (step, metrics) = recorder.lines[0]
    assert (step, metrics["reward/mean"], metrics["run/samples"]) == (1, 0.5, 2.0)
    assert metrics["generation/busy_slots_share"] == 0.75
    assert metrics["trainer/flops_utilisation_share"] > 0
    assert metrics["drops/cancelled_total_rollouts"] == 3.0
    assert metrics["waits/generation_for_trainer_max_lag_seconds"] == 1e-9
    assert recorder.reports[0].step == 1
    assert (tmp_path / "step_000001.txt").exists()


def test_evaluations_and_checkpoints_when_due_but_not_after_the_last_step(tmp_path):
    observer, recorder = make_observer(
        tmp_path, checkpointing={"every_steps": 2}, evaluation={"every_steps": 2}
    )
    for version in (1, 2, 3, 4):
        asyncio.run(observer.after_step(report(version)))
    assert recorder.saved == [(2, 4)]
    evaluated = [step for step, line in recorder.lines if "evaluation/accuracy_share" in line]
    assert evaluated == [2]
    assert recorder.reports[-1].accuracy == 0.25


def test_a_version_is_saved_once(tmp_path):
    observer, recorder = make_observer(tmp_path)
    observer.save(3)
    observer.save(3)
    assert [version for version, _ in recorder.saved] == [3]


def test_a_step_that_was_left_out_is_not_saved_and_the_next_good_one_is(tmp_path):
    observer, recorder = make_observer(tmp_path, checkpointing={"every_steps": 1})
    lost = dataclasses.replace(report(2), metrics=report(2).metrics | {"trainer/loss": math.nan})
    for each in (report(1), lost):
        asyncio.run(observer.after_step(each))
    assert not observer.save(2)
    assert recorder.saved == [(1, 2)]
    assert recorder.notes[-1] == "no checkpoint of step 2: its loss or gradient was not finite"
    asyncio.run(observer.after_step(report(3)))
    assert [version for version, _ in recorder.saved] == [1, 3]


@pytest.mark.parametrize(("version", "before"), [(0, 0.25), (3, None)])
def test_accuracy_before_is_that_of_step_zero(tmp_path, version, before):
    observer, recorder = make_observer(tmp_path)
    asyncio.run(observer.evaluate(version))
    summary = observer._totals.summary(version=version, finished=False)
    assert (summary.accuracy_before, summary.accuracy_after) == (before, 0.25)
    assert "2 of 8 right" in recorder.notes[-1]

"""Compares schedules or settings: several runs with the same seeds, data order and budget.

    python launch/compare.py --config=configs/compare_schedules.py --workdir=runs/compare

Rows run one after another, each in a process of its own. The same command again leaves out what
has finished, and always writes the table of what is there: table.txt, table.json and plots in the
workdir. `--rows=a,b` runs only these; `--config.base.section.key=value` changes a setting of all
rows. `--dry_run` prints the rows and what sets them apart. docs/comparing.md explains the columns.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

import search_path
from command_line import define_config, required, run_main
from pipeline_rl_jax.orchestrate.comparison import (
    Comparison,
    Run,
    changed_settings,
    parse_comparison,
    select_rows,
)
from pipeline_rl_jax.orchestrate.comparison_report import write_report
from pipeline_rl_jax.orchestrate.comparison_runs import ChildPlan, ChildRunner, read_outcome
from pipeline_rl_jax.telemetry.progress import print_line
from pipeline_rl_jax.telemetry.workdir import alone_in, open_workdir

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory for the runs, the table and the plots.")
_ROWS = flags.DEFINE_string("rows", "", "Rows to run, separated by commas; all if empty.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the rows and do nothing.")
_FAILED, _STOPPED = 1, 130


def main() -> int:
    comparison = parse_comparison(required(_CONFIG, example="configs/compare_schedules.py"))
    names = [name.strip() for name in _ROWS.value.split(",") if name.strip()]
    runs = select_rows(comparison, names)
    if _DRY_RUN.value:
        _print_plan(runs)
        return 0
    opened = open_workdir(required(_WORKDIR, example="runs/compare"))
    with alone_in(opened):
        return _compare(comparison, runs, workdir=opened.root)


def _compare(comparison: Comparison, runs: Sequence[Run], *, workdir: Path) -> int:
    for run in comparison.runs:  # before hours are spent: one table, one set of settings
        read_outcome(run, workdir / run.name)

    missing = [run for run in runs if not _is_complete(run, workdir)]
    stopped = _run_all(missing, workdir, max_seconds=comparison.max_seconds)
    print_line(write_report(comparison, workdir).removesuffix("\n"))
    if stopped:
        return _STOPPED
    return 0 if all(_is_complete(run, workdir) for run in runs) else _FAILED


def _run_all(runs: Sequence[Run], workdir: Path, *, max_seconds: float) -> bool:
    """Runs them in turn; True when Ctrl-C or SIGTERM ended this early."""
    runner = ChildRunner(
        ChildPlan(command=_train_command, max_seconds=max_seconds, show=print_line)
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: runner.stop())
    for place, run in enumerate(runs, 1):
        if runner.stopped:
            break
        print_line(f"{run.name} ({place} of {len(runs)})")
        outcome = runner.run(run, workdir / run.name)
        if outcome is not None and not outcome.complete:
            print_line(f"{run.name} failed with exit code {outcome.exit_code}")
    return runner.stopped


def _is_complete(run: Run, workdir: Path) -> bool:
    outcome = read_outcome(run, workdir / run.name)
    return outcome is not None and outcome.complete


def _train_command(config: Path, workdir: Path) -> list[str]:
    train = search_path.ROOT / "launch" / "train.py"
    return [sys.executable, "-u", str(train), f"--config={config}", f"--workdir={workdir}"]


def _print_plan(runs: Sequence[Run]) -> None:
    for run in runs:
        settings = run.settings
        print(
            f"{run.name}: {settings.schedule.num_steps} steps of "
            f"{settings.trainer.batch_rollouts} rollouts"
        )
        for path, value in changed_settings(
            run, [other for other in runs if other is not run]
        ).items():
            print(f"  {path} = {value!r}")


if __name__ == "__main__":
    run_main(main)

"""The outcome of a comparison: reads the runs that are there, writes table and plots.

Owns which runs enter, and what is said of those that did not. Figures, table and plots are
`evaluation/`'s.
"""

from __future__ import annotations

from pathlib import Path

from pipeline_rl_jax.evaluation.comparison_plots import plot_comparison
from pipeline_rl_jax.evaluation.comparison_table import format_table, table_json
from pipeline_rl_jax.evaluation.run_figures import (
    Metrics,
    common_ground,
    mean_figures,
    run_figures,
    training_rows,
)
from pipeline_rl_jax.orchestrate.comparison import Comparison, Run
from pipeline_rl_jax.orchestrate.comparison_runs import Outcome, read_metrics, read_outcome
from pipeline_rl_jax.telemetry.workdir import write_atomically


def write_report(comparison: Comparison, workdir: Path) -> str:
    """Writes table.txt, table.json and the plots of all complete runs; returns the text.

    Runs that failed or are missing are named beneath the table, with the end of their output.
    """
    complete: dict[Run, list[Metrics]] = {}
    remarks = []
    for run in comparison.runs:
        outcome = read_outcome(run, workdir / run.name)
        rows = training_rows(read_metrics(workdir / run.name))
        if outcome is not None and outcome.complete and rows:
            complete[run] = rows
        else:
            remarks.append(_remark(run, outcome))
    text = "No run is complete.\n"
    if complete:
        text = _write_table(comparison, complete, workdir)
        remarks.append(
            plot_comparison(
                {run.name: rows for run, rows in complete.items()},
                workdir,
                warmup_steps=comparison.warmup_steps,
            )
        )
    text += "".join(f"\n{remark}\n" for remark in remarks if remark)
    write_atomically(workdir / "table.txt", text)
    return text


def _write_table(comparison: Comparison, complete: dict[Run, list[Metrics]], workdir: Path) -> str:
    warmup = comparison.warmup_steps
    common = common_ground(list(complete.values()), warmup_steps=warmup)
    assert common is not None  # every complete run has a step
    table = []
    for row in comparison.rows:
        figures = [
            run_figures(row, rows, warmup_steps=warmup, common=common)
            for run, rows in complete.items()
            if run.row == row
        ]
        if figures:
            table.append((mean_figures(figures), figures))
    write_atomically(workdir / "table.json", table_json(table))
    return format_table([figures for figures, _ in table], common, warmup_steps=warmup)


def _remark(run: Run, outcome: Outcome | None) -> str:
    if outcome is None:
        return f"{run.name}: not run to its end"
    lines = "".join(f"\n  {line}" for line in outcome.last_lines)
    return f"{run.name}: failed with exit code {outcome.exit_code}; the end of its output:{lines}"

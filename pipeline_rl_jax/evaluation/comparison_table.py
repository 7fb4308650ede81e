"""The table of a comparison: `table.json` for programs, `table.txt` for people.

Owns columns, headings and rounding. What the figures mean is in `run_figures.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline_rl_jax.evaluation.run_figures import CommonGround, RunFigures
from pipeline_rl_jax.telemetry.figures import format_number, format_share

_Format = Callable[[float | None], str]


def _format_reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


# Heading, figure, how it is written; one block of the text each.
_BLOCKS: Mapping[str, Sequence[tuple[str, str, _Format]]] = {
    "Speed": (
        ("samples/s", "samples_per_second", format_number),
        ("after warm-up", "steady_samples_per_second", format_number),
        ("seconds", "seconds", format_number),
        ("step s median", "step_seconds_median", format_number),
        ("step s mean", "step_seconds_mean", format_number),
        ("decode tok/s", "decode_tokens_per_second", format_number),
        ("train tok/s", "train_tokens_per_second", format_number),
    ),
    "Reward": (
        ("at samples", "reward_at_samples", _format_reward),
        ("at time", "reward_at_seconds", _format_reward),
        ("mean height", "reward_auc_samples", _format_reward),
        ("at its end", "reward_final", _format_reward),
        ("samples", "samples", format_number),
        ("steps", "optimizer_steps", format_number),
    ),
    "On-policyness and idle time": (
        ("lag mean", "lag_mean_steps", format_number),
        ("lag max", "lag_max_steps", format_number),
        ("ESS", "ess_mean", _format_reward),
        ("trainer idle", "trainer_idle_share", format_share),
        ("trainer busy", "trainer_busy_share", format_share),
        ("gener. idle", "generation_idle_share", format_share),
        ("gener. busy", "generation_busy_share", format_share),
        ("busy slots", "busy_slots_share", format_share),
        ("tokens mean", "completion_mean_tokens", format_number),
        ("tokens max", "completion_max_tokens", format_number),
    ),
    # Left out where no row has any of them.
    "Reward model and deferrals": (
        ("scoring idle", "scoring_idle_share", format_share),
        ("read ahead", "read_ahead_share", format_share),
        ("deferred once", "deferred_once_share", format_share),
        ("longer", "deferred_longer_share", format_share),
    ),
}


def format_table(rows: Sequence[RunFigures], common: CommonGround, *, warmup_steps: int) -> str:
    """Blocks with a line per row, and beneath them what "at" and "after warm-up" are."""
    width = max(len(row.name) for row in rows)
    blocks = []
    for title, columns in _BLOCKS.items():
        if all(getattr(row, figure) is None for row in rows for _, figure, _ in columns):
            continue
        lines = [title, " " * width + _line([heading for heading, _, _ in columns])]
        for row in rows:
            cells = [write(getattr(row, figure)) for _, figure, write in columns]
            lines.append(f"{row.name:<{width}}" + _line(cells))
        blocks.append("\n".join(lines))
    blocks.append(
        f"Rewards at {common.samples:,.0f} samples, and at {common.seconds:,.1f} s after warm-up; "
        f"each is a mean over the eighth\nof the samples before. Warm-up: the first {warmup_steps} "
        "steps, which compile."
    )
    return "\n\n".join(blocks) + "\n"


def table_json(rows: Sequence[tuple[RunFigures, Sequence[RunFigures]]]) -> str:
    """A list with an object per row: its figures, and under `per_seed` those of every seed."""
    values: list[dict[str, Any]] = [
        {
            **dataclasses.asdict(row),
            "per_seed": [dataclasses.asdict(run) for run in runs],
        }
        for row, runs in rows
    ]
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "".join(f"  {cell:>13}" for cell in cells)

"""The figures of a whole run: `summary.json` and the lines a person reads at the end.

Owns which figures every run reports. They are measured elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from pipeline_rl_jax.telemetry.figures import format_number, format_share
from pipeline_rl_jax.telemetry.workdir import Workdir, write_atomically


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Figures of one run; None where nothing was measured (an accuracy without evaluation)."""

    accuracy_before: float | None  # share of evaluation prompts answered right, greedy, step 0
    accuracy_after: float | None
    reward_before: float | None  # mean reward of the same greedy completions
    reward_after: float | None
    evaluation_prompts: int
    finished: bool  # False when the run was interrupted before schedule.num_steps
    optimizer_steps: int
    inflight_updates: int  # weight swaps while completions were being decoded
    mixed_version_share: float | None  # share of completions written by more than one version
    lag_mean_steps: float | None  # over all tokens trained on, at loss time
    lag_max_steps: float | None
    samples: int  # completions trained on
    samples_per_second: float | None
    decode_tokens_per_second: float | None  # over the time generation was at work
    train_tokens_per_second: float | None  # over the time of train steps
    train_seconds: float  # from the first prompt admitted to the end of the last step


def write_summary(workdir: Workdir, summary: RunSummary) -> None:
    """Writes summary.json, whole or not at all; a figure that is not finite becomes null."""
    values: Mapping[str, Any] = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(summary).items()
    }
    write_atomically(workdir.summary, json.dumps(values, indent=2, allow_nan=False) + "\n")


def format_summary(summary: RunSummary) -> str:
    """The block of text at the end of a run."""
    end = "" if summary.finished else " (interrupted)"
    lag_mean = format_number(summary.lag_mean_steps)
    lag_max = format_number(summary.lag_max_steps)
    rows = [
        _evaluation_row(summary),
        ("optimizer steps", f"{summary.optimizer_steps}{end} in {summary.train_seconds:.1f} s"),
        ("samples", f"{summary.samples} ({format_number(summary.samples_per_second)}/s)"),
        ("decode", f"{format_number(summary.decode_tokens_per_second)} tokens/s"),
        ("train", f"{format_number(summary.train_tokens_per_second)} tokens/s"),
        ("in-flight updates", f"{summary.inflight_updates}"),
        ("token lag", f"mean {lag_mean}, max {lag_max} steps"),
        ("mixed versions", f"{format_share(summary.mixed_version_share)} of completions"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows) + "\n"


def _evaluation_row(summary: RunSummary) -> tuple[str, str]:
    """Accuracy, or where nothing is right or wrong the mean reward."""
    prompts = summary.evaluation_prompts
    if summary.accuracy_after is None and summary.reward_after is not None:
        before, after = map(_reward, (summary.reward_before, summary.reward_after))
        return "greedy reward", f"{before} before, {after} after"
    before = _accuracy(summary.accuracy_before, prompts)
    after = _accuracy(summary.accuracy_after, prompts)
    return "greedy accuracy", f"{before} before, {after} after"


def _reward(mean: float | None) -> str:
    return "not measured" if mean is None else f"{mean:.4g}"


def _accuracy(share: float | None, prompts: int) -> str:
    return "not measured" if share is None else f"{round(share * prompts)}/{prompts}"

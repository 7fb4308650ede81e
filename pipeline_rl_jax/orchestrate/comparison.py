"""What a comparison is: named rows of settings, run with the same seeds and budget.

Owns reading `configs/compare_*.py` into checked settings. Knows no schedule: a row is whatever it
changes of the base. Running the rows is `comparison_runs.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from pipeline_rl_jax.settings import Settings, SettingsError
from pipeline_rl_jax.settings_parsing import parse_settings, setting_paths, settings_to_dict

_KEYS = ("base", "rows", "seeds", "budget", "warmup_steps")
_BUDGET_KEYS = ("samples", "seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One row with one seed."""

    row: str
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """Also its directory below the comparison's."""
        return f"{self.row}/seed_{self.seed}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every run, row by row (in the order of their names), and what they have in common."""

    runs: Sequence[Run]
    max_seconds: float  # of training, after which a run is stopped; 0 = never
    warmup_steps: int

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(run.row for run in self.runs))


def parse_comparison(config: ConfigDict | Mapping[str, Any]) -> Comparison:
    """Checked settings of every run. Raises `SettingsError` with one line for every mistake.

    A mistake of the base shows in every row and is told once.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    problems = list(_shape_problems(values))
    if problems:
        raise SettingsError(*problems)
    runs = []
    for row, changes in values["rows"].items():
        for seed in values["seeds"]:
            try:
                runs.append(Run(row=row, seed=seed, settings=_settings(values, changes, seed)))
            except SettingsError as error:
                problems += [f"rows.{row}: {problem}" for problem in error.problems]
    if problems:
        raise SettingsError(*_told_once(problems))
    return Comparison(
        runs=runs,
        max_seconds=float(values["budget"]["seconds"]),
        warmup_steps=values["warmup_steps"],
    )


def select_rows(comparison: Comparison, names: Sequence[str]) -> list[Run]:
    """The runs of these rows, of all when there is no name. `SettingsError` for an unknown one."""
    problems = []
    for name in names:
        if name not in comparison.rows:
            near = difflib.get_close_matches(name, comparison.rows, n=1)
            way_out = f"did you mean {near[0]}?" if near else f"use {', '.join(comparison.rows)}"
            problems.append(f"--rows ({name}) is no row of the config; {way_out}")
    if problems:
        raise SettingsError(*problems)
    return [run for run in comparison.runs if not names or run.row in names]


def changed_settings(run: Run, others: Sequence[Run]) -> dict[str, Any]:
    """Settings in which the runs differ, as this run has them."""
    readers = {path: operator.attrgetter(path) for path in setting_paths()}
    return {
        path: read(run.settings)
        for path, read in readers.items()
        if any(read(other.settings) != read(run.settings) for other in others)
    }


def _shape_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong before any row can be read."""
    wanted, found = set(_KEYS), set(values)
    if wanted != found:
        names = ", ".join(sorted(wanted ^ found))
        yield f"a comparison's config has the keys {', '.join(_KEYS)}; missing or unknown: {names}"
        return
    budget, seeds, warmup = values["budget"], values["seeds"], values["warmup_steps"]
    if not isinstance(budget, Mapping) or set(budget) != set(_BUDGET_KEYS):
        yield f"budget ({budget!r}) must have the keys {' and '.join(_BUDGET_KEYS)}"
    elif not _is_whole(budget["samples"]) or budget["samples"] < 1:
        yield f"budget.samples ({budget['samples']!r}) must be a whole number, 1 or more"
    elif not isinstance(budget["seconds"], int | float) or not 0 <= budget["seconds"] < math.inf:
        yield f"budget.seconds ({budget['seconds']!r}) must be a number, 0 (no limit) or more"
    if not isinstance(values["rows"], Mapping) or not values["rows"]:
        yield "rows must name at least one row, for example {'mine': {'seed': 1}}"
        return
    for row, changes in values["rows"].items():
        if not isinstance(changes, Mapping):
            yield f"rows.{row} ({changes!r}) must be a section of settings to change, or {{}}"
        elif not row.replace("-", "_").isidentifier():
            yield f"rows.{row} must be named with letters, digits, - and _: it names a directory"
    if not seeds or not all(map(_is_whole, seeds)) or len(set(seeds)) < len(seeds):
        yield f"seeds ({seeds!r}) must hold distinct whole numbers, for example (42,)"
    if not _is_whole(warmup) or warmup < 0:
        yield f"warmup_steps ({warmup!r}) must be a whole number, 0 or more"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _settings(values: Mapping[str, Any], changes: Mapping[str, Any], seed: int) -> Settings:
    """The base with the row's changes, its seed, and as many steps as the budget has batches."""
    merged = _merge(values["base"], changes)
    samples, warmup = values["budget"]["samples"], values["warmup_steps"]
    settings = parse_settings(_merge(merged, {"seed": seed}))
    batch = settings.trainer.batch_rollouts
    if samples % batch:
        raise SettingsError(
            f"budget.samples ({samples}) must be a multiple of trainer.batch_rollouts ({batch}); "
            f"use {max(1, samples // batch) * batch}"
        )
    if samples // batch <= warmup:
        raise SettingsError(
            f"budget.samples ({samples}) are {samples // batch} steps, no more than warmup_steps "
            f"({warmup}); use {4 * max(1, warmup) * batch}"
        )
    num_steps = {"schedule": {"num_steps": samples // batch}}
    return parse_settings(_merge(settings_to_dict(settings), num_steps))


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _told_once(problems: Sequence[str]) -> list[str]:
    """Of problems that differ in their row only, the first."""
    first: dict[str, str] = {}
    for problem in problems:
        first.setdefault(problem.partition(": ")[2], problem)
    return list(first.values())

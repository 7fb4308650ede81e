"""From the metrics of runs to the figures by which they are compared.

Owns what each figure means, and pure functions only: rows of `metrics.jsonl` in, numbers out. The
table's text is in `comparison_table.py`.

The first `warmup_steps` steps compile. "After warm-up" is from the end of step `warmup_steps` on,
where every run has trained on as many batches as the others and compiled most of its programs.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Metrics = Mapping[str, Any]  # one line of metrics.jsonl; a value that was not finite is None

WINDOW_SHARE = 1 / 8  # of the samples in question, over which a reward "at" a point is averaged


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonGround:
    """How far every run got: where runs of different length can be compared."""

    samples: float
    seconds: float  # after warm-up


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run, or the mean of several; None where nothing was measured."""

    name: str
    seeds: int
    optimizer_steps: float
    samples: float
    seconds: float | None  # of training, compilation included
    samples_per_second: float | None  # the quotient of the two above
    steady_samples_per_second: float | None  # after warm-up
    step_seconds_median: float | None  # after warm-up
    step_seconds_mean: float | None  # after warm-up; rounds of several steps make it differ
    reward_final: float | None  # mean over the last eighth of the run's own samples
    reward_auc_samples: float | None  # mean height of reward over samples, up to the common number
    reward_at_samples: float | None  # over the last eighth before the common number of samples
    reward_at_seconds: float | None  # the same where the common time after warm-up is over
    lag_mean_steps: float | None  # over loss tokens of all steps
    lag_max_steps: float | None
    ess_mean: float | None  # raw ratios, mean over all steps
    ess_clamped_mean: float | None
    trainer_idle_share: float | None  # of wall time after warm-up
    generation_idle_share: float | None  # the same; slots that idle count in part
    trainer_busy_share: float | None  # in train_step, of wall time after warm-up
    generation_busy_share: float | None  # in prefill and decode calls, of the same time
    busy_slots_share: float | None  # of the slots decoded in; over steps after warm-up, by time
    decode_tokens_per_second: float | None  # while decoding, after warm-up
    train_tokens_per_second: float | None  # while in train_step, after warm-up
    completion_mean_tokens: float | None
    completion_max_tokens: float | None
    scoring_idle_share: float | None  # of a reward model with devices of its own, after warm-up
    read_ahead_share: float | None  # of the tokens it read, those read before a completion's end
    deferred_once_share: float | None  # of the groups trained on, those put off by one step
    deferred_longer_share: float | None  # by more steps


def training_rows(lines: Sequence[Metrics]) -> list[Metrics]:
    """The lines of optimizer steps, in order; those of evaluations are left out."""
    rows = [line for line in lines if line.get("trainer/step_seconds") is not None]
    return sorted(rows, key=lambda line: line["step"])


def common_ground(runs: Sequence[Sequence[Metrics]], *, warmup_steps: int) -> CommonGround | None:
    """The smallest number of samples and the shortest time of all runs; None without any step."""
    runs = [rows for rows in runs if rows]
    if not runs:
        return None
    return CommonGround(
        samples=min(rows[-1]["run/samples"] for rows in runs),
        seconds=min(_end(rows) - _warmup_end(rows, warmup_steps) for rows in runs),
    )


def run_figures(
    name: str, rows: Sequence[Metrics], *, warmup_steps: int, common: CommonGround
) -> RunFigures:
    """The figures of one run from its training rows. ValueError when there is no row."""
    if not rows:
        raise ValueError(f"{name} has no optimizer step to compare")
    steady = [row for row in rows if row["step"] > warmup_steps]
    samples, seconds = rows[-1]["run/samples"], _end(rows)
    steady_seconds = sum(row["trainer/step_seconds"] for row in steady)
    return RunFigures(
        name=name,
        seeds=1,
        optimizer_steps=len(rows),
        samples=samples,
        seconds=seconds,
        samples_per_second=_ratio(samples, seconds),
        steady_samples_per_second=_ratio(_sum(steady, "batch/rollouts"), steady_seconds),
        step_seconds_median=_median([row["trainer/step_seconds"] for row in steady]),
        step_seconds_mean=_ratio(steady_seconds, len(steady)),
        reward_final=reward_near(rows, samples),
        reward_auc_samples=reward_mean_height(rows, common.samples),
        reward_at_samples=reward_near(rows, common.samples),
        reward_at_seconds=reward_near(rows, _samples_at(rows, common, warmup_steps)),
        lag_mean_steps=_weighted(rows, "lag/mean_steps", by=_value("batch/loss_tokens")),
        lag_max_steps=_max(rows, "lag/max_steps"),
        ess_mean=_weighted(rows, "importance/ess_raw_share"),
        ess_clamped_mean=_weighted(rows, "importance/ess_clamped_share"),
        trainer_idle_share=_weighted(steady, "trainer/idle_share", by=_STEP_SECONDS),
        generation_idle_share=_weighted(steady, "generation/idle_share", by=_STEP_SECONDS),
        trainer_busy_share=_ratio(_sum(steady, "trainer/busy_seconds"), steady_seconds),
        generation_busy_share=_ratio(
            sum(_sum(steady, f"spans/{name}_seconds") for name in _GENERATION_SPANS),
            steady_seconds,
        ),
        busy_slots_share=_weighted(steady, "generation/busy_slots_share", by=_DECODE_SECONDS),
        decode_tokens_per_second=_weighted(
            steady, "generation/tokens_per_second", by=_DECODE_SECONDS
        ),
        train_tokens_per_second=_ratio(
            _sum(steady, "batch/tokens"), _sum(steady, "trainer/busy_seconds")
        ),
        completion_mean_tokens=_weighted(rows, "completion/mean_tokens"),
        completion_max_tokens=_max(rows, "completion/max_tokens"),
        scoring_idle_share=_weighted(steady, "scoring/idle_share", by=_STEP_SECONDS),
        read_ahead_share=_ratio(
            _sum(steady, "scoring/streamed_tokens"),
            _sum(steady, "scoring/streamed_tokens") + _sum(steady, "scoring/final_tokens"),
        ),
        deferred_once_share=_deferred_share(rows[-1], lambda steps: steps == 1),
        deferred_longer_share=_deferred_share(rows[-1], lambda steps: steps > 1),
    )


def mean_figures(runs: Sequence[RunFigures]) -> RunFigures:
    """The mean over seeds of every figure; the maximum where the figure is one."""
    values: dict[str, Any] = {"name": runs[0].name, "seeds": len(runs)}
    for field in dataclasses.fields(RunFigures):
        if field.name in values:
            continue
        found = [value for run in runs if (value := getattr(run, field.name)) is not None]
        join = max if "_max_" in field.name else statistics.fmean
        values[field.name] = join(found) if found else None
    return RunFigures(**values)


def reward_near(rows: Sequence[Metrics], samples: float) -> float | None:
    """Mean reward of the batches that ended within the last `WINDOW_SHARE` of the first `samples`.

    At least the last batch that ended by then; None when none had.
    """
    before = [row for row in rows if row["run/samples"] <= samples]
    near = [row for row in before if row["run/samples"] > samples * (1 - WINDOW_SHARE)]
    return _weighted(near or before[-1:], "reward/mean", by=_value("batch/rollouts"))


def reward_mean_height(rows: Sequence[Metrics], samples: float) -> float | None:
    """`1/S ∫_0^S reward(s) ds` by the trapezoid rule.

    A batch's reward stands where its samples have been trained on; straight lines between, and the
    first batch's reward before it.
    """
    points = [
        (row["run/samples"], row["reward/mean"])
        for row in rows
        if row.get("reward/mean") is not None
    ]
    if not points or samples <= 0:
        return None
    points = [(0.0, points[0][1]), *points]
    area = 0.0
    for (start, low), (end, high) in itertools.pairwise(points):
        if start >= samples:
            break
        if end > samples:
            high = low + (high - low) * (samples - start) / (end - start)
            end = samples
        area += (end - start) * (low + high) / 2
    return area / min(samples, points[-1][0])


def steady_seconds(rows: Sequence[Metrics], *, warmup_steps: int) -> list[float]:
    """Time of the end of every row, 0 at the end of warm-up (negative before)."""
    start = _warmup_end(rows, warmup_steps)
    return [row["run/train_seconds"] - start for row in rows]


def _samples_at(rows: Sequence[Metrics], common: CommonGround, warmup_steps: int) -> float:
    """Samples trained on when the common time after warm-up was over."""
    times = steady_seconds(rows, warmup_steps=warmup_steps)
    # A step that ends in this very moment counts, however its time was rounded.
    done = [row for row, time in zip(rows, times, strict=True) if time <= common.seconds + 1e-6]
    return done[-1]["run/samples"] if done else 0.0


def _warmup_end(rows: Sequence[Metrics], warmup_steps: int) -> float:
    """Training time when step `warmup_steps` had ended, or the run."""
    ends = [row["run/train_seconds"] for row in rows if row["step"] <= warmup_steps]
    return ends[-1] if ends else 0.0


def _end(rows: Sequence[Metrics]) -> float:
    return rows[-1]["run/train_seconds"]


def _deferred_share(last: Metrics, counts: Callable[[int], bool]) -> float | None:
    """From the histogram since the start, which every line of schedule `oppo` has."""
    found = {
        int(match[1]): value
        for name, value in last.items()
        if (match := re.fullmatch(r"overcommit/deferred_(\d+)_steps_groups", name)) and value
    }
    return _ratio(sum(n for steps, n in found.items() if counts(steps)), sum(found.values()))


def _value(key: str) -> Callable[[Metrics], float]:
    return lambda row: row.get(key) or 0.0


_STEP_SECONDS = _value("trainer/step_seconds")
_DECODE_SECONDS = _value("spans/decode_chunk_seconds")
_GENERATION_SPANS = ("prefill", "insert", "decode_chunk", "weight_swap")


def _sum(rows: Sequence[Metrics], key: str) -> float:
    return sum(map(_value(key), rows))


def _max(rows: Sequence[Metrics], key: str) -> float | None:
    return max((row[key] for row in rows if row.get(key) is not None), default=None)


def _weighted(
    rows: Sequence[Metrics], key: str, *, by: Callable[[Metrics], float] = lambda row: 1.0
) -> float | None:
    """Mean of a metric over the rows that have it."""
    present = [(by(row), row[key]) for row in rows if row.get(key) is not None]
    return _ratio(
        sum(weight * value for weight, value in present), sum(weight for weight, _ in present)
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None

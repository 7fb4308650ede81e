"""How far two sides of a run were at work at the same time, from the spans of its `trace.json`.

Owns reading that file and the arithmetic of intervals. Spans are host time: a side is busy while
the host waits for its device.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

GENERATION_SPANS = ("prefill", "insert", "decode_chunk")
TRAINER_SPANS = ("train_step",)


@dataclasses.dataclass(frozen=True)
class Interval:
    """One span of work."""

    name: str
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Shares of a stretch of wall time; they add up to 1."""

    both: float
    generation_only: float
    trainer_only: float
    neither: float


def read_timeline(path: Path) -> list[Interval]:
    """The spans of a Chrome trace in order of their start, also of one that was cut short."""
    text = path.read_text(encoding="utf-8").strip().removesuffix("]").rstrip().rstrip(",")
    complete_lines = text.splitlines()
    try:
        json.loads(complete_lines[-1].lstrip("["))
    except (ValueError, IndexError):
        complete_lines = complete_lines[:-1]  # the writer was killed in the middle of a line
    events = json.loads("\n".join(complete_lines).rstrip(",") + "]") if complete_lines else []
    spans = [
        Interval(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]
    return sorted(spans, key=lambda span: span.start_seconds)


def after_step(spans: Sequence[Interval], step: int) -> list[Interval]:
    """What began after the `step`-th train_step of the file and before the last one ended.

    So compilation, evaluation and saving stay out. Empty when there are no more steps than that.
    """
    steps = [span for span in spans if span.name in TRAINER_SPANS]
    if len(steps) <= step:
        return []
    start = steps[step - 1].end_seconds if step else steps[0].start_seconds
    end = steps[-1].end_seconds
    return [span for span in spans if span.start_seconds >= start and span.end_seconds <= end]


def overlap(spans: Iterable[Interval]) -> Overlap:
    """Shares of the time from the first of these spans to the last one's end.

    ValueError when no span is of either side.
    """
    spans = list(spans)
    generation = merged(span for span in spans if span.name in GENERATION_SPANS)
    trainer = merged(span for span in spans if span.name in TRAINER_SPANS)
    if not generation and not trainer:
        raise ValueError("no span of generation or of the trainer in this stretch of time")
    ends = [end for sides in (generation, trainer) for end in itertools.chain(*sides)]
    total = max(ends) - min(ends)
    both = _common_seconds(generation, trainer)
    generation_only, trainer_only = _seconds(generation) - both, _seconds(trainer) - both
    return Overlap(
        both=both / total,
        generation_only=generation_only / total,
        trainer_only=trainer_only / total,
        neither=1 - (both + generation_only + trainer_only) / total,
    )


def merged(spans: Iterable[Interval]) -> list[tuple[float, float]]:
    """The union of intervals as disjoint ones, ascending."""
    union: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_seconds):
        if union and span.start_seconds <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], span.end_seconds))
        else:
            union.append((span.start_seconds, span.end_seconds))
    return union


def format_overlaps(overlaps: Mapping[str, Overlap]) -> str:
    """A line per run, in per cent of wall time."""
    width = max(map(len, overlaps))
    names = [field.name for field in dataclasses.fields(Overlap)]
    lines = [" " * width + "".join(f"  {name.replace('_', ' '):>15}" for name in names)]
    for run, shares in overlaps.items():
        cells = "".join(f"  {getattr(shares, name):>15.1%}" for name in names)
        lines.append(f"{run:<{width}}{cells}")
    return "\n".join(lines) + "\n"


def _seconds(union: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in union)


def _common_seconds(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> float:
    """Length of the intersection of two unions of disjoint, ascending intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total

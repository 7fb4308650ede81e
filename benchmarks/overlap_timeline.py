"""Shows how far generation and training of runs overlap, from their timelines.

    python benchmarks/overlap_timeline.py conventional=runs/compare/conventional_g1/seed_42 \\
        pipeline=runs/compare/pipeline_keep/seed_42 --picture=overlap.png

Each run must have been made with `--config.telemetry.timeline=True` (a comparison:
`--config.base.telemetry.timeline=True`). Prints the shares of wall time in which both sides were
busy, one of them, or neither, after the steps that compile; the picture shows the spans of some
steps in the middle.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline_rl_jax.evaluation.overlap import (
    GENERATION_SPANS,
    TRAINER_SPANS,
    Interval,
    after_step,
    format_overlaps,
    overlap,
    read_timeline,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=WORKDIR")
    parser.add_argument("--warmup_steps", type=int, default=8, help="steps left out: they compile")
    parser.add_argument("--picture", help="a .png to write; needs matplotlib")
    parser.add_argument("--picture_steps", type=int, default=4, help="optimizer steps it shows")
    options = parser.parse_args()
    steady: dict[str, list[Interval]] = {}
    for run in options.runs:
        name, _, workdir = run.partition("=")
        path = Path(workdir) / "trace.json"
        if not path.is_file():
            return _mistake(f"{run}: there is no {path}; run with telemetry.timeline=True")
        steady[name] = after_step(read_timeline(path), options.warmup_steps)
        if not steady[name]:
            return _mistake(f"{run} has no step after --warmup_steps ({options.warmup_steps})")
    print(format_overlaps({name: overlap(spans) for name, spans in steady.items()}), end="")
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        return _mistake("--picture needs matplotlib: pip install 'pipeline-rl-jax[plots]'")
    if options.picture:
        middle = {name: _middle(spans, options.picture_steps) for name, spans in steady.items()}
        _draw(middle, Path(options.picture))
        print(f"wrote {options.picture}")
    return 0


def _mistake(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2


def _middle(spans: Sequence[Interval], num_steps: int) -> list[Interval]:
    """What began within `num_steps` optimizer steps in the middle of the run."""
    steps = [span for span in spans if span.name in TRAINER_SPANS]
    first = max(0, (len(steps) - num_steps) // 2)
    start, end = (
        steps[first].start_seconds,
        steps[min(first + num_steps, len(steps)) - 1].end_seconds,
    )
    return [span for span in spans if start <= span.start_seconds < end]


def _draw(runs: Mapping[str, Sequence[Interval]], path: Path) -> None:
    """Two rows of bars a run: what generation did above, what the trainer did below."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs), 1, figsize=(12, 1.6 * len(runs) + 0.6), squeeze=False)
    for axis, (name, spans) in zip(axes[:, 0], runs.items(), strict=True):
        start = min(span.start_seconds for span in spans)
        for row, (side, colour) in enumerate(
            ((TRAINER_SPANS, "tab:orange"), (GENERATION_SPANS, "tab:blue"))
        ):
            bars = [
                (span.start_seconds - start, span.end_seconds - span.start_seconds)
                for span in spans
                if span.name in side
            ]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
        axis.set_yticks((0, 1), ("trainer", "generation"))
        axis.set_title(name, loc="left", fontsize="medium")
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())

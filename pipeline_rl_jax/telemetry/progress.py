"""Shows how a run goes: a live panel on a terminal, plain lines elsewhere.

Owns what is shown and how often. Figures arrive in `ProgressReport`; nothing is measured here but
the time between steps, for the time left.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Literal, Protocol

import rich.console
import rich.live
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from pipeline_rl_jax.telemetry.figures import format_duration, format_number, format_share

_LINE_SECONDS = 10.0  # between two plain lines
_REFRESHES_PER_SECOND = 2
_NUM_STEP_TIMES = 20  # recent steps whose median time predicts the rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressReport:
    """What is worth seeing after optimizer step `step`; NaN or None is shown as a dash."""

    step: int
    num_steps: int
    reward_mean: float
    accuracy: float | None  # share right, of the last evaluation
    lag_mean_steps: float
    lag_max_steps: float
    decode_tokens_per_second: float
    train_tokens_per_second: float
    trainer_wait_share: float  # of the last step's time, waiting for rollouts
    generation_wait_share: float  # of the last step's time, waiting for room in the stream


class Progress(Protocol):
    """Something that shows reports. `close` must be called, also when the run fails."""

    def update(self, report: ProgressReport) -> None: ...

    def note(self, text: str) -> None:
        """Shows what goes on outside the steps, for example "evaluating 100 prompts"."""
        ...

    def close(self) -> None: ...


def open_progress(
    mode: Literal["auto", "on", "off"], *, console: rich.console.Console | None = None
) -> Progress:
    """The display that `telemetry.progress` asks for; `console` is standard output if not given."""
    console = console or rich.console.Console()
    if mode == "off":
        return SilentProgress()
    if mode == "on" or (console.is_terminal and not console.is_dumb_terminal):
        return PanelProgress(console)
    return LineProgress(lambda text: print_line(text, file=console.file))


def print_line(text: str, *, file: IO[str] | None = None) -> None:
    """Prints at once. A reader that has gone away (`| head`) costs what it would have read: the
    run goes on, and its files hold everything."""
    stream = file if file is not None else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class SilentProgress:
    """Shows nothing."""

    def update(self, report: ProgressReport) -> None:
        del report

    def note(self, text: str) -> None:
        del text

    def close(self) -> None: ...


class LineProgress:
    """At most one line every ten seconds, but always the first and the last step."""

    def __init__(
        self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._print_line = print_line
        self._clock = clock
        self._times = StepTimes(clock)
        self._last_line_seconds = -math.inf

    def update(self, report: ProgressReport) -> None:
        self._times.add()
        now = self._clock()
        last = report.step >= report.num_steps
        if last or now - self._last_line_seconds >= _LINE_SECONDS:
            self._last_line_seconds = now
            self._print_line(format_line(report, self._times.left_seconds(report)))

    def note(self, text: str) -> None:
        self._print_line(text)

    def close(self) -> None: ...


class PanelProgress:
    """A panel redrawn in place. Text that others print or log appears above it, whole."""

    def __init__(self, console: rich.console.Console) -> None:
        self._times = StepTimes(time.monotonic)
        self._note = "starting"
        self._report: ProgressReport | None = None
        self._live = rich.live.Live(
            self._draw(), console=console, refresh_per_second=_REFRESHES_PER_SECOND
        )
        self._live.start()

    def update(self, report: ProgressReport) -> None:
        self._times.add()
        self._report, self._note = report, ""
        self._live.update(self._draw())

    def note(self, text: str) -> None:
        self._note = text
        self._live.update(self._draw(), refresh=True)

    def close(self) -> None:
        self._note = ""
        self._live.update(self._draw())
        self._live.stop()

    def _draw(self) -> rich.panel.Panel:
        table = rich.table.Table.grid(padding=(0, 2))
        if self._report is not None:
            report, left = self._report, self._times.left_seconds(self._report)
            bar = rich.progress_bar.ProgressBar(
                total=report.num_steps, completed=report.step, width=30
            )
            table.add_row("step", f"{report.step}/{report.num_steps}", bar)
            for name, value, detail in describe(report, left):
                table.add_row(name, value, detail)
        rows = rich.console.Group(table, rich.text.Text(self._note)) if self._note else table
        return rich.panel.Panel(rows, title="pipeline_rl_jax", expand=False)


class StepTimes:
    """Times between steps, from which the time left is predicted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_NUM_STEP_TIMES + 1)

    def add(self) -> None:
        """Marks the end of a step."""
        self._ends.append(self._clock())

    def left_seconds(self, report: ProgressReport) -> float | None:
        """Median recent step time times the steps left; None before the second step.

        The first step is never part of it: it compiles.
        """
        ends = list(self._ends)
        durations = [end - start for start, end in itertools.pairwise(ends)]
        if not durations:
            return None
        return statistics.median(durations) * (report.num_steps - report.step)


def describe(report: ProgressReport, left_seconds: float | None) -> list[tuple[str, str, str]]:
    """Rows of name, value and detail, as the panel shows them."""
    return [
        ("reward", format_number(report.reward_mean), _accuracy(report)),
        (
            "token lag",
            f"{format_number(report.lag_mean_steps)} steps",
            f"max {format_number(report.lag_max_steps)}",
        ),
        ("decode", f"{format_number(report.decode_tokens_per_second)} tok/s", ""),
        ("train", f"{format_number(report.train_tokens_per_second)} tok/s", ""),
        ("trainer waits", format_share(report.trainer_wait_share), "for rollouts"),
        ("generation waits", format_share(report.generation_wait_share), "for the trainer"),
        ("time left", format_duration(left_seconds), ""),
    ]


def format_line(report: ProgressReport, left_seconds: float | None) -> str:
    """The same on one line, without control characters."""
    parts = [f"step {report.step}/{report.num_steps}"]
    for name, value, detail in describe(report, left_seconds):
        if name == "token lag":
            name, value = "lag", f"{format_number(report.lag_mean_steps)} ({detail})"
        if name == "reward" and detail:
            value = f"{value} ({detail})"
        parts.append(f"{name} {value}")
    return " | ".join(parts)


def _accuracy(report: ProgressReport) -> str:
    return "" if report.accuracy is None else f"accuracy {report.accuracy:.0%}"

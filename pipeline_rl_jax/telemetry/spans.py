"""Named spans of host time: who worked, who waited, and for how long.

Owns the totals per name that idle shares are made of. A span also shows in a JAX profile and, when
one is open, in the timeline file. Span names are declared in `schema.py` like metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from pipeline_rl_jax.telemetry.timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanTotals:
    """What spans add up to over a window of time.

    Spans of one name that run at once (two worker threads) add up, so a share may exceed 1.
    """

    elapsed_seconds: float
    seconds: Mapping[str, float]
    counts: Mapping[str, int]  # spans that ended within the window

    def share(self, name: str) -> float:
        """Share of the window spent inside spans of this name; 0 for an empty window."""
        return self.seconds.get(name, 0.0) / self.elapsed_seconds if self.elapsed_seconds else 0.0

    def metrics(self) -> dict[str, float]:
        """`spans/<name>_seconds` and `spans/<name>_share` of every name seen."""
        result = {}
        for name, seconds in self.seconds.items():
            result[f"spans/{name}_seconds"] = seconds
            result[f"spans/{name}_share"] = self.share(name)
        return result


@dataclasses.dataclass
class _OpenSpan:
    name: str
    counted_until: float  # everything before is in the totals already


class SpanRecorder:
    """Adds up spans of all threads. One window ends where the next begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._open: dict[int, _OpenSpan] = {}
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._window_start = clock()
        self._timeline: Timeline | None = None

    @contextlib.contextmanager
    def record(self, name: str, *, track: str) -> Iterator[None]:
        start = self._clock()
        with self._lock:
            span_id = next(self._ids)
            self._open[span_id] = _OpenSpan(name, start)
        try:
            yield
        finally:
            end = self._clock()
            with self._lock:
                self._count(self._open.pop(span_id), end)
                self._counts[name] = self._counts.get(name, 0) + 1
                if self._timeline is not None:
                    self._timeline.add(name, track=track, start_seconds=start, end_seconds=end)

    def take_totals(self) -> SpanTotals:
        """Totals since the last call, open spans counted up to now; starts a new window."""
        with self._lock:
            now = self._clock()
            for span in self._open.values():
                self._count(span, now)
            totals = SpanTotals(
                elapsed_seconds=now - self._window_start, seconds=self._seconds, counts=self._counts
            )
            self._seconds, self._counts, self._window_start = {}, {}, now
        return totals

    def attach(self, timeline: Timeline | None) -> None:
        """Sends every span that ends from now on to a timeline, or to none."""
        with self._lock:
            self._timeline = timeline

    def _count(self, span: _OpenSpan, until: float) -> None:
        seconds = until - span.counted_until
        self._seconds[span.name] = self._seconds.get(span.name, 0.0) + seconds
        span.counted_until = until


# One per process, like the JAX profiler: a stage names its work without being handed a recorder.
RECORDER = SpanRecorder()


@contextlib.contextmanager
def span(name: str, *, track: str | None = None, step: int | None = None) -> Iterator[None]:
    """Measures what runs inside, under a name; in a JAX profile it shows under the same name.

    `track` is its row in the timeline, if not given the name of the thread. A span around an
    `await` names its track, for example "rewards": coroutines take turns on one thread, whose row
    would hold bars that overlap. `step` marks an optimizer step, by which the profiler groups its
    overview.
    """
    if step is not None:
        annotation = jax.profiler.StepTraceAnnotation(name, step_num=step)
    else:
        annotation = jax.profiler.TraceAnnotation(name)
    with RECORDER.record(name, track=track or threading.current_thread().name), annotation:
        yield


@contextlib.contextmanager
def timeline_file(path: Path) -> Iterator[None]:
    """Inside, every span of this process that ends is written to a timeline file."""
    timeline = Timeline(path)
    RECORDER.attach(timeline)
    try:
        yield
    finally:
        RECORDER.attach(None)
        timeline.close()


def take_span_totals() -> SpanTotals:
    """Totals of this process's spans since the last call."""
    return RECORDER.take_totals()

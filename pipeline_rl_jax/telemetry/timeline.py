"""Writes spans as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Owns the file format only; what is a span is in `spans.py`. The file is readable at any moment of
the run and after a kill: the format allows its closing bracket to be missing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from pipeline_rl_jax.telemetry.workdir import keep_earlier

_FLUSH_SECONDS = 1.0


class Timeline:
    """One row (track) per thread or stage, one bar per span; times from the start of the file.

    Calls must not overlap: `SpanRecorder` makes them under its lock.
    """

    def __init__(self, path: Path) -> None:
        keep_earlier(path)
        self._file = open(path, "w", encoding="utf-8")
        self._file.write("[\n")
        self._tracks: dict[str, int] = {}
        self._start_seconds = self._flushed_seconds = time.monotonic()
        self._num_events = 0

    def add(self, name: str, *, track: str, start_seconds: float, end_seconds: float) -> None:
        """One bar; times are those of `time.monotonic()`."""
        self._write(
            {
                "name": name,
                "ph": "X",
                "pid": os.getpid(),
                "tid": self._row(track),
                "ts": round((start_seconds - self._start_seconds) * 1e6, 1),
                "dur": round((end_seconds - start_seconds) * 1e6, 1),
            }
        )
        if end_seconds - self._flushed_seconds >= _FLUSH_SECONDS:
            self._file.flush()
            self._flushed_seconds = end_seconds

    def close(self) -> None:
        self._file.write("\n]\n")
        self._file.close()

    def _row(self, track: str) -> int:
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks) + 1
            self._write(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": os.getpid(),
                    "tid": self._tracks[track],
                    "args": {"name": track},
                }
            )
        return self._tracks[track]

    def _write(self, event: dict[str, object]) -> None:
        self._file.write((",\n" if self._num_events else "") + json.dumps(event))
        self._num_events += 1

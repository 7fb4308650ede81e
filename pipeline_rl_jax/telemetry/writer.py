"""Writes the metrics of a step to `metrics.jsonl` and to TensorBoard.

Owns what happens to the lines of an earlier attempt. Does not own when metrics are fetched from a
device: values arrive as numbers on the host.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pipeline_rl_jax.settings import TelemetrySettings
from pipeline_rl_jax.telemetry.schema import check_names, find_metric
from pipeline_rl_jax.telemetry.workdir import Workdir, write_atomically

_LOGGER = logging.getLogger(__name__)


class MetricWriter(Protocol):
    """Where metrics go. `step` is the number of optimizer steps applied, 0 before the first."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_writer(
    workdir: Workdir, settings: TelemetrySettings, *, first_step: int, strict: bool = False
) -> MetricWriter:
    """The writer of a run: JSONL always, TensorBoard when `telemetry.tensorboard` says so.

    `first_step` as in `JsonlWriter`. `strict` makes a metric that the schema does not declare a
    ValueError; otherwise it is written all the same and warned about once.
    """
    jsonl = JsonlWriter(
        workdir.metrics, superseded_path=workdir.superseded_metrics, first_step=first_step
    )
    writers: list[MetricWriter] = [jsonl]
    if settings.tensorboard:
        writers.append(
            TensorBoardWriter(
                workdir.tensorboard, first_step=first_step, run_attempt=jsonl.run_attempt
            )
        )
    return CheckedWriter(writers, strict=strict)


class JsonlWriter:
    """Appends one JSON object a line: `step`, `run_attempt`, `unix_seconds`, then the metrics.

    Every line is flushed. A value that is not finite is written as null, which JSON has. Metrics of
    one step may come in several writes (training, evaluation) and then stand on several lines.
    """

    def __init__(self, path: Path, *, superseded_path: Path, first_step: int) -> None:
        """Lines of an earlier attempt at `first_step` or later move to `superseded_path`.

        `first_step` is the first step this attempt will write: 0 for a fresh start, n + 1 when it
        resumes from a checkpoint of step n. So no step stands twice in the file, and nothing that
        was measured is lost. A line cut short by a kill moves too.
        """
        lines = _read_lines(path)
        kept = [line.text for line in lines if line.step is not None and line.step < first_step]
        if len(kept) < len(lines):
            superseded = [
                line.text for line in lines if line.step is None or line.step >= first_step
            ]
            with open(superseded_path, "a", encoding="utf-8") as file:
                file.writelines(f"{text}\n" for text in superseded)
        if lines:
            # Also when nothing moved: the last line may lack its line end.
            write_atomically(path, "".join(f"{text}\n" for text in kept))
        self.run_attempt = 1 + max((line.run_attempt for line in lines), default=0)
        self._file = open(path, "a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {
            "step": step,
            "run_attempt": self.run_attempt,
            "unix_seconds": round(time.time(), 3),
            **{name: _finite_or_none(value) for name, value in metrics.items()},
        }
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard, flushed after every write and described by the schema.

    A value that is not finite leaves a gap in its curve.
    """

    def __init__(self, directory: Path, *, first_step: int, run_attempt: int) -> None:
        # Imported here: where torch is installed it comes along, and with it seconds of start-up.
        import tensorboardX

        # purge_step hides what an earlier attempt wrote at this step or later. The suffix keeps two
        # attempts of the same second from writing one file.
        self._writer = tensorboardX.SummaryWriter(
            str(directory), purge_step=first_step, filename_suffix=f".attempt{run_attempt}"
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                continue
            metric = find_metric(name)
            description = f"{metric.description} [{metric.unit}]" if metric else ""
            self._writer.add_scalar(name, float(value), step, summary_description=description)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class CheckedWriter:
    """Hands metrics to every writer, one thread at a time, after a look into the schema."""

    def __init__(self, writers: Sequence[MetricWriter], *, strict: bool) -> None:
        self._writers = writers
        self._strict = strict
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._strict:
            check_names(metrics)
        with self._lock:
            for name in metrics:
                if name not in self._warned and find_metric(name) is None:
                    self._warned.add(name)
                    _LOGGER.warning("metric %s is not declared in telemetry/schema.py", name)
            for writer in self._writers:
                writer.write(step, metrics)

    def close(self) -> None:
        with self._lock:
            for writer in self._writers:
                writer.close()


class _Line(NamedTuple):
    text: str
    step: int | None  # None: not a line of ours, or cut short
    run_attempt: int


def _read_lines(path: Path) -> list[_Line]:
    if not path.exists():
        return []
    return [_read_line(text) for text in path.read_text(encoding="utf-8").splitlines()]


def _read_line(text: str) -> _Line:
    try:
        line = json.loads(text)
        return _Line(text, int(line["step"]), int(line["run_attempt"]))
    except (ValueError, TypeError, KeyError):
        return _Line(text, None, 0)


def _finite_or_none(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None

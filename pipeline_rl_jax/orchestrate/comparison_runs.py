"""Runs of a comparison, one after another, each in a child process of its own.

Owns a run's directory beside what training writes there: `row_config.py` (what the child is
started with), `output.txt` (what it printed) and `outcome.json`. A process per run, so that no
run inherits another's compiled programs, memory or threads. Figures are `evaluation/`'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline_rl_jax.orchestrate.comparison import Run
from pipeline_rl_jax.settings import SettingsError
from pipeline_rl_jax.settings_parsing import settings_to_dict
from pipeline_rl_jax.telemetry.workdir import Workdir, keep_earlier, write_atomically

_POLL_SECONDS = 0.3
_LAST_LINES = 15  # of a failed child's output that are shown again
_CONFIG_FILE = '''\
"""Settings of one run of a comparison, as launch/compare.py resolved them."""

import json

from ml_collections import ConfigDict

SETTINGS = r"""
{settings}
"""


def get_config() -> ConfigDict:
    return ConfigDict(json.loads(SETTINGS))
'''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. `over_budget`: stopped after `budget.seconds`, and complete in that."""

    exit_code: int
    over_budget: bool
    last_lines: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return self.exit_code == 0 or self.over_budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChildPlan:
    """How children are started and when they are stopped.

    `command` gives the command line for a config file and a workdir; `max_seconds` of training
    (0 = no limit) is when a child is told to stop; `show` prints a line.
    """

    command: Callable[[Path, Path], Sequence[str]]
    max_seconds: float
    show: Callable[[str], None]


class ChildRunner:
    """Runs children until told to stop."""

    def __init__(self, plan: ChildPlan) -> None:
        self._plan = plan
        self._num_stops = 0  # how often `stop` was called

    @property
    def stopped(self) -> bool:
        return self._num_stops > 0

    def stop(self) -> None:
        """Ends the child in order, at the second call at once. For a signal handler."""
        self._num_stops += 1

    def run(self, run: Run, directory: Path) -> Outcome | None:
        """Trains one run in its directory. None when `stop` was called meanwhile."""
        prepare_directory(run, directory)
        command = self._plan.command(directory / "row_config.py", directory)
        output = directory / "output.txt"
        with open(output, "wb") as file:
            # A session of its own: Ctrl-C reaches the child once, through `stop`.
            child = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            over_budget = self._watch(child, run, directory)
        finally:
            _kill_group(child)
        if self.stopped:
            return None
        lines = tuple(output.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        outcome = Outcome(exit_code=child.returncode, over_budget=over_budget, last_lines=lines)
        text = json.dumps(dataclasses.asdict(outcome), indent=2) + "\n"
        write_atomically(_outcome_path(directory), text)
        return outcome

    def _watch(self, child: subprocess.Popen[bytes], run: Run, directory: Path) -> bool:
        """Shows what the child prints until it ends. True when it was stopped over budget."""
        shown, over_budget, num_stops_sent, running = 0, False, 0, True
        while running:
            running = child.poll() is None
            shown = self._show_new(run, directory / "output.txt", shown, last=not running)
            if not running:
                break
            if not over_budget and self._is_over_budget(directory):
                over_budget = True
                self._plan.show(f"{run.name} | budget.seconds are over")
                child.terminate()
            if self._num_stops > num_stops_sent:
                num_stops_sent = self._num_stops
                child.terminate() if num_stops_sent == 1 else child.kill()
            time.sleep(_POLL_SECONDS)
        return over_budget

    def _show_new(self, run: Run, output: Path, shown: int, *, last: bool) -> int:
        """Shows the lines past byte `shown`; returns where they end."""
        with open(output, "rb") as file:
            file.seek(shown)
            text = file.read()
        end = len(text) if last else text.rfind(b"\n") + 1
        for line in text[:end].decode(errors="replace").splitlines():
            self._plan.show(f"{run.name} | {line}")
        return shown + end

    def _is_over_budget(self, directory: Path) -> bool:
        if not self._plan.max_seconds:
            return False
        rows = read_metrics(directory)
        return any(row.get("run/train_seconds", 0.0) >= self._plan.max_seconds for row in rows[-1:])


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Ends the child, if it still runs, and whatever it left behind."""
    with contextlib.suppress(ProcessLookupError):  # the usual case: nobody is left
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def read_outcome(run: Run, directory: Path) -> Outcome | None:
    """How this run ended in that directory, None when it has not, or began only.

    Raises `SettingsError` when the directory holds a run of other settings.
    """
    path = _outcome_path(directory)
    if not path.is_file():
        return None
    if (directory / "row_config.py").read_text() != _config_text(run):
        raise SettingsError(
            f"--workdir: {directory} holds a run of other settings; name another directory, or "
            "delete that one to run it again"
        )
    values = json.loads(path.read_text())
    return Outcome(**{**values, "last_lines": tuple(values["last_lines"])})


def prepare_directory(run: Run, directory: Path) -> None:
    """An empty directory with the run's config; what an unfinished attempt left is kept aside."""
    keep_earlier(directory)
    directory.mkdir(parents=True)
    write_atomically(directory / "row_config.py", _config_text(run))


def read_metrics(directory: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; one that is being written is left out."""
    path = Workdir(directory).metrics
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _outcome_path(directory: Path) -> Path:
    return directory / "outcome.json"


def _config_text(run: Run) -> str:
    settings = json.dumps(settings_to_dict(run.settings), indent=2, allow_nan=False)
    return _CONFIG_FILE.replace("{settings}", settings)

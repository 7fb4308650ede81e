"""Asks the verifier service, from any thread or event loop, and keeps the service alive.

Owns the service process: starts it, restarts it when it dies or falls silent, and gives every
question exactly one answer. The workers and their deadlines are in `verifier_worker.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import enum
import itertools
import json
import os
import pathlib
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from typing import Literal

from pipeline_rl_jax.rewards.score import Score

_PACKAGE_ROOT = pathlib.Path(__file__).resolve().parents[2]
_START_SECONDS = 180.0  # importing sympy on a busy host
_SILENCE_SECONDS = (
    15.0  # beyond the deadline: some worker must have answered or been killed by then
)
_CLOSE_SECONDS = 5.0
_MAX_FAILED_STARTS = 3
_MAX_SERVICES = 3  # service processes that may die with the same question open

Kind = Literal["equal", "search"]


class Outcome(enum.Enum):
    """What became of a question."""

    YES = "yes"
    NO = "no"
    DEADLINE = "deadline"  # its worker was killed at the deadline
    CRASH = "crash"  # its worker died, and the next one too


class VerifierUnavailableError(RuntimeError):
    """The service cannot be started, or has been closed: there is no answer."""


@dataclasses.dataclass
class _Question:
    line: bytes
    future: concurrent.futures.Future[Outcome]
    asked_seconds: float
    num_services: int = 1  # how many service processes have been asked


class VerifierPool:
    """Worker processes that compare answers ("equal") and search patterns ("search").

    Every question is answered within `deadline_seconds` of a worker taking it up; a late one with
    `Outcome.DEADLINE`. Usable from several threads and event loops at once; a forked child must
    make its own. `kinds` are those that will be asked: math-verify is imported for "equal" only.
    """

    def __init__(
        self, *, num_workers: int, deadline_seconds: float, kinds: Collection[Kind]
    ) -> None:
        self._arguments = [str(num_workers), str(deadline_seconds), str(os.getpid())]
        self._arguments.append(",".join(sorted(kinds)))
        self._silence_seconds = deadline_seconds + _SILENCE_SECONDS
        self._owner_pid = os.getpid()
        self._ids = itertools.count()
        self._questions: dict[int, _Question] = {}
        self._unavailable = ""  # why nothing can be asked any more
        # Two locks: a writer that waits for the service must not keep replies from being read.
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._process = self._start()
        self._thread = threading.Thread(target=self._serve, name="verifier", daemon=True)
        self._thread.start()

    async def ask(self, kind: Kind, left: str, right: str) -> Outcome:
        """`equal`: does answer `right` mean gold `left`? `search`: is pattern `left` in `right`?

        Raises VerifierUnavailableError when the service is closed or cannot be kept alive.
        """
        if os.getpid() != self._owner_pid:
            raise VerifierUnavailableError(
                "the verifier belongs to another process; make a new one"
            )
        future: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        with self._lock:
            if self._unavailable:
                raise VerifierUnavailableError(self._unavailable)
            question_id = next(self._ids)
            line = json.dumps([question_id, kind, left, right]).encode() + b"\n"
            self._questions[question_id] = _Question(line, future, time.monotonic())
        self._write(line)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the service and its workers; questions still open fail. Safe to call twice."""
        self._fail_all("the verifier was closed")
        # At the end of its input the service ends its workers; killed, it could not.
        if self._write_lock.acquire(timeout=_CLOSE_SECONDS):
            _close_input(self._process)
            self._write_lock.release()
        self._thread.join(timeout=_CLOSE_SECONDS)
        self._process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        inherited = os.environ.get("PYTHONPATH")
        paths = [str(_PACKAGE_ROOT), *([inherited] if inherited else [])]
        return subprocess.Popen(
            # -P: a file of the working directory must not shadow a module of the service.
            [sys.executable, "-P", "-m", f"{__package__}.verifier_worker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for the trainer, which then closes the service
        )

    def _write(self, line: bytes) -> None:
        with self._write_lock:
            assert self._process.stdin is not None
            try:
                # An unbuffered pipe may take a part only.
                while line:
                    line = line[self._process.stdin.write(line) :]
            except (BrokenPipeError, ValueError):
                pass  # the service is gone; the thread starts another and asks again

    def _serve(self) -> None:
        """Thread: reads replies, and restarts the service until closed or hopeless."""
        num_failed_starts = 0
        while True:
            was_ready = self._read_replies(self._process)
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            num_failed_starts = 0 if was_ready else num_failed_starts + 1
            if num_failed_starts == _MAX_FAILED_STARTS:
                self._fail_all(f"the verifier service died {num_failed_starts} times at its start")
            with self._write_lock:
                _close_input(self._process)
                if self._unavailable:
                    return
                self._process = self._start()
            # Beside this thread: who writes much to a service must have its replies read meanwhile.
            threading.Thread(target=self._ask_again, name="verifier-restart", daemon=True).start()

    def _read_replies(self, process: subprocess.Popen[bytes]) -> bool:
        """Settles questions until the service ends or falls silent; whether it ever was ready."""
        assert process.stdout is not None
        was_ready, partial_line = False, b""
        heard_seconds, patience_seconds = time.monotonic(), _START_SECONDS
        while True:
            if not _is_readable(process.stdout.fileno(), timeout_seconds=1.0):
                waiting_since = max(heard_seconds, self._oldest_question_seconds())
                if time.monotonic() - waiting_since > patience_seconds:
                    return was_ready
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return was_ready
            heard_seconds, patience_seconds = time.monotonic(), self._silence_seconds
            *lines, partial_line = (partial_line + data).split(b"\n")
            for line in lines:
                question_id, outcome = json.loads(line)
                if question_id == "ready":
                    was_ready = True
                else:
                    self._settle(question_id, Outcome(outcome))

    def _oldest_question_seconds(self) -> float:
        """When the oldest open question was asked; now when there is none."""
        with self._lock:
            oldest = next(iter(self._questions.values()), None)
        return oldest.asked_seconds if oldest else time.monotonic()

    def _settle(self, question_id: int, outcome: Outcome | VerifierUnavailableError) -> None:
        with self._lock:
            question = self._questions.pop(question_id, None)
        # None: asked twice around a restart. A caller that was cancelled has cancelled its future.
        if question is None or not question.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Outcome):
            question.future.set_result(outcome)
        else:
            question.future.set_exception(outcome)

    def _ask_again(self) -> None:
        """Puts the open questions to a new service; one that has outlived several is given up."""
        with self._lock:
            questions = dict(self._questions)
        for question_id, question in questions.items():
            question.num_services += 1
            if question.num_services > _MAX_SERVICES:
                reason = f"{_MAX_SERVICES} verifier services died before answering"
                self._settle(question_id, VerifierUnavailableError(reason))
            else:
                self._write(question.line)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._unavailable = self._unavailable or reason
            question_ids = list(self._questions)
        for question_id in question_ids:
            self._settle(question_id, VerifierUnavailableError(reason))


async def score_by_verifier(pool: VerifierPool, kind: Kind, left: str, right: str) -> Score:
    """1 for yes and 0 for no. No answer in time is a wrong answer, no verifier is no score."""
    try:
        outcome = await pool.ask(kind, left, right)
    except VerifierUnavailableError as error:
        return Score(value=0.0, error="verifier_unavailable", detail=str(error))
    events = {Outcome.DEADLINE: "verifier_deadline", Outcome.CRASH: "verifier_crash"}
    return Score(value=float(outcome is Outcome.YES), event=events.get(outcome, ""))


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def _is_readable(descriptor: int, *, timeout_seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(timeout_seconds))

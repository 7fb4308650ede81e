"""A reward for code: the tests that the program in a completion passes.

Owns finding the program and its tests, and one sandbox process per completion; what confines the
program is `code_sandbox.py`'s. Nothing the model wrote is ever run in this process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipeline_rl_jax.records import Completion, Prompt
from pipeline_rl_jax.rewards.score import Score

_SANDBOX = pathlib.Path(__file__).with_name("code_sandbox.py")
_START_SECONDS = 10.0  # beyond the wall time of the tests, on a busy host
_PYTHON_FENCES = ("", "python", "python3", "py")
_ISOLATION = ("network", "processes", "files")

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeLimits:
    """What the tests of one completion may use."""

    wall_seconds: float = 10.0  # all tests together
    cpu_seconds: int = 5  # each test, and each process it starts
    memory_bytes: int = 512 << 20  # address space of each process
    output_bytes: int = 1 << 20  # what a test prints, and each file it writes
    max_processes: int = 8  # processes and threads of a test, itself included


class CodeTests:
    """Scores the last Python block of a completion by the tests of its prompt.

    `share`: passed tests over all tests. `all`: 1 when every one passes, else 0. Without a program
    or beyond a limit a test fails, which is a score; tests that are missing, and a sandbox that
    fails, are errors, so that the rollout is dropped. Usable from several threads and event loops.
    """

    def __init__(
        self,
        *,
        score: Literal["share", "all"],
        num_workers: int,
        limits: CodeLimits | None = None,
        namespaces: bool = True,
    ) -> None:
        """Runs one program to see that the sandbox works: RuntimeError with the reason if not.

        Does without namespaces, with a warning, where the host allows none or not all that is
        needed, and where `namespaces` is False. `isolation` says what is kept from programs by
        the kernel, of "network", "processes" and "files".
        """
        if sys.platform != "linux":
            raise RuntimeError("rewards.correctness (code) needs Linux to confine programs")
        self._all = score == "all"
        self._limits = limits or CodeLimits()
        self._namespaces = namespaces
        self._threads = concurrent.futures.ThreadPoolExecutor(num_workers, "code-tests")
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self.isolation = self._try_out()

    async def score(self, completion: Completion) -> Score:
        try:
            tests = find_tests(completion.prompt)
        except ValueError as error:
            return Score(value=0.0, error="code_tests_missing", detail=str(error))
        program = last_python_block(completion.text)
        if program is None:
            return Score(value=0.0, event="code_missing")
        loop = asyncio.get_running_loop()
        try:
            reply = await loop.run_in_executor(self._threads, self._run_sandbox, program, tests)
        except RuntimeError as error:
            return Score(value=0.0, error="code_sandbox_failed", detail=str(error))
        num_passed = sum(reply["passed"])
        value = float(num_passed == len(tests)) if self._all else num_passed / len(tests)
        return Score(value=value, event="code_deadline" if reply["late"] else "")

    async def close(self) -> None:
        """Ends what is running. Safe to call twice."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.kill()
        # Calls that still wait for a thread are answered, with an error.
        await asyncio.to_thread(self._threads.shutdown)

    def _try_out(self) -> tuple[str, ...]:
        """The isolation of a program that must pass."""
        program, tests = "answer = 1", [{"call": "assert answer == 1"}]
        try:
            reply = self._run_sandbox(program, tests)
        except RuntimeError as error:
            if not self._namespaces:
                raise
            _logger.warning("programs cannot be tested in namespaces: %s", error)
            self._namespaces = False
            reply = self._run_sandbox(program, tests)
        if reply["passed"] != [True]:
            raise RuntimeError(
                f"the sandbox for code cannot run Python within {self._limits}; allow more"
            )
        missing = [name for name in _ISOLATION if name not in reply["isolation"]]
        if missing:
            _logger.warning(
                "programs are tested without namespaces for: %s; the interpreter refuses sockets, "
                "processes and files elsewhere instead, which a program can get around",
                ", ".join(missing),
            )
        return tuple(reply["isolation"])

    def _run_sandbox(self, program: str, tests: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """Thread: its reply. Raises RuntimeError when there is none."""
        directory = tempfile.mkdtemp(prefix="code-tests-")
        job = {
            **dataclasses.asdict(self._limits),
            "directory": directory,
            "program": program,
            "tests": list(tests),
            "stop_at_failure": self._all,
            "namespaces": self._namespaces,
        }
        try:
            return self._exchange(json.dumps(job).encode())
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _exchange(self, job: bytes) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox for code was closed")
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_SANDBOX)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                start_new_session=True,  # Ctrl-C is for the trainer, which then closes us
            )
            self._running.add(process)
        try:
            reply, errors = process.communicate(job, self._limits.wall_seconds + _START_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError("the sandbox for code fell silent") from error
        finally:
            # Whatever the sandbox has started dies with it.
            process.kill()
            process.communicate()
            with self._lock:
                self._running.discard(process)
        if not reply:
            lines = errors.decode(errors="replace").strip().splitlines() or ["it was killed"]
            raise RuntimeError(f"the sandbox for code ended without a reply: {lines[-1]}")
        return json.loads(reply)


def last_python_block(text: str) -> str | None:
    """The last closed ``` block of `text` that is Python by its label or has none.

    A block that is not closed was cut off and does not count. None without a block.
    """
    found: str | None = None
    fence, label, lines = "", "", []
    for line in text.splitlines():
        stripped = line.strip()
        ticks = len(stripped) - len(stripped.lstrip("`"))
        if not fence:
            if ticks >= 3:
                fence, label, lines = "`" * ticks, stripped[ticks:].strip().lower(), []
        elif ticks >= len(fence) and stripped == "`" * ticks:
            if label.split(" ")[0] in _PYTHON_FENCES:
                found = "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line)
    return found


def find_tests(prompt: Prompt) -> list[dict[str, str]]:
    """The tests of a prompt: `metadata["tests"]`, else its answer read as JSON.

    A list of which each is Python source to be run below the program ("assert f(2) == 4"), or
    {"input": ..., "output": ...} for a program that reads stdin and prints. Outputs are compared
    without white space at line ends. Raises ValueError for anything else.
    """
    where = f"the tests of prompt_id {prompt.prompt_id}"
    tests = prompt.metadata.get("tests")
    if tests is None:
        try:
            tests = json.loads(prompt.answer)
        except ValueError as error:
            raise ValueError(f"{where} must be a JSON list: {error}") from error
    if not isinstance(tests, list | tuple) or not tests:
        raise ValueError(f"{where} must be a list of at least one")
    return [_read_test(test, where) for test in tests]


def _read_test(test: object, where: str) -> dict[str, str]:
    if isinstance(test, str):
        return {"call": test}
    if isinstance(test, Mapping) and set(test) == {"input", "output"}:
        return {"input": str(test["input"]), "output": str(test["output"])}
    raise ValueError(f'{where} must each be a string or {{"input": ..., "output": ...}}')

"""Blocking device work, awaited.

Owns one daemon thread per stage: calls of a stage run in the order they were made, and a call that
never returns keeps neither the event loop nor the interpreter from ending.
`asyncio.to_thread` gives neither: its pool is unordered, and is joined at exit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Job = tuple[concurrent.futures.Future[Any], Callable[[], Any]]


class StageThread:
    """The thread in which one stage does its blocking work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The function's result or error. Cancelled: a call not yet begun is skipped, one that has
        begun runs on and its result is lost."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._jobs.put((future, lambda: function(*args, **kwargs)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """The thread ends after the calls already made; none may follow."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except StopIteration as error:
                # A future cannot carry it, and whoever awaits would wait for ever.
                future.set_exception(RuntimeError(f"{self._name} raised {error!r}"))
            except BaseException as error:  # noqa: BLE001  # it is raised where it is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
            del job, future, function  # keep no array alive while the thread is idle

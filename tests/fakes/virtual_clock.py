"""An event loop whose time jumps: whatever sleeps, sleeps for nothing, in the right order."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class VirtualDeadlock(RuntimeError):
    """Every task waits and no timer is set: on a real clock this would hang for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None):
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise VirtualDeadlock("every task waits and no timer is set")
        self.now_seconds += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping_selector = _JumpingSelector()
        super().__init__(self._jumping_selector)

    def time(self) -> float:
        return self._jumping_selector.now_seconds


def run_virtual(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """`asyncio.run` under virtual time, which starts at 0."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(coroutine)

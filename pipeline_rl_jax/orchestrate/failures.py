"""The one error that a failing run ends with: it names the stage.

Owns the error, how the several errors of a task group become one, and the error of a run that works
but gets nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import TypeVar

from pipeline_rl_jax.rollouts.waits import WaitedTooLong, Waits

_T = TypeVar("_T")


class StageFailure(RuntimeError):
    """A stage failed, or was waited for in vain; `cause` is the error itself."""

    def __init__(self, stage: str, cause: Exception) -> None:
        super().__init__(f"{stage}: {type(cause).__name__}: {cause}")
        self.stage = stage
        self.cause = cause


class HopelessRun(RuntimeError):
    """Nothing is broken, but going on would change nothing; the message says what to mend."""


@contextlib.contextmanager
def naming(stage: str) -> Iterator[None]:
    """Whatever goes wrong inside leaves as a StageFailure of this stage, unless it is one."""
    try:
        yield
    except StageFailure:
        raise
    except Exception as error:  # nothing is swallowed: every error leaves, with a name
        raise StageFailure(stage, error) from error


async def call(waits: Waits, stage: str, awaitable: Awaitable[_T]) -> _T:
    """Awaits a call of a stage, under the deadline, its errors named."""
    with naming(stage):
        return await waits.working(awaitable, who=stage)


@contextlib.asynccontextmanager
async def one_failure() -> AsyncIterator[None]:
    """Around a task group: of its errors the one that explains most is raised alone.

    A stage's own error explains more than a deadline, which may be its consequence. The others are
    added as notes. An interrupt or exit passes as it is.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        # A task that another awaited brings its error twice.
        errors = list({id(error): error for error in _leaves(group)}.values())
        errors.sort(key=_explains_less)
        first = errors[0]
        for other in errors[1:]:
            first.add_note(f"also failed: {other}")
        raise first from (first.cause if isinstance(first, StageFailure) else None)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _explains_less(error: BaseException) -> int:
    if not isinstance(error, Exception):
        return 0
    cause = error.cause if isinstance(error, StageFailure) else error
    return 2 if isinstance(cause, WaitedTooLong) else 1

"""Who waits for whom, for how long, and when that is too long.

Owns the wait times of a run by pair of names and the one deadline that every wait has. Reads the
clock of the running event loop, so that virtual time works. Knows nothing of what is waited for.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
from collections.abc import Awaitable, Iterator, Mapping
from typing import TypeVar

_T = TypeVar("_T")
_MAX_LISTED = 8


class WaitedTooLong(TimeoutError):
    """A wait reached the deadline; the message says who waited for whom, and what else went on."""


class Waits:
    """The waits of one run."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._seconds: dict[tuple[str, str], float] = {}
        self._reported: dict[tuple[str, str], float] = {}
        self._current: dict[int, tuple[str, float]] = {}  # what goes on now, and since when
        self._waiting: dict[int, tuple[str, str, float]] = {}  # who, whom, counted up to when
        self._ids = itertools.count()

    async def within(self, awaitable: Awaitable[_T], *, who: str, whom: str) -> _T:
        """Awaits, counts the time as `who` waiting for `whom`; WaitedTooLong at the deadline."""
        with self._counted(who, whom):
            return await self._until_deadline(
                awaitable, doing=f"{who} waits for {whom}", failure=f"{who} waited %g s for {whom}"
            )

    async def working(self, awaitable: Awaitable[_T], *, who: str) -> _T:
        """Awaits a call of the stage `who`, which is work and no wait, under the same deadline."""
        return await self._until_deadline(
            awaitable, doing=f"{who} is at work", failure=f"{who} was at work for %g s in one call"
        )

    @contextlib.contextmanager
    def timing(self, who: str, whom: str) -> Iterator[None]:
        """Counts the time inside as `who` waiting for `whom`, without a deadline."""
        with self._listed(f"{who} waits for {whom}"), self._counted(who, whom):
            yield

    def add(self, who: str, whom: str, seconds: float) -> None:
        """Counts a wait that was measured otherwise."""
        self._seconds[who, whom] = self._seconds.get((who, whom), 0.0) + seconds

    @property
    def seconds(self) -> Mapping[tuple[str, str], float]:
        """Time waited since the start, by (who, whom)."""
        return dict(self._seconds)

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """Time waited since this was last called, unfinished waits included.

        Pairs that did not wait are left out.
        """
        now = asyncio.get_running_loop().time()
        for key, (who, whom, counted_up_to) in self._waiting.items():
            self.add(who, whom, now - counted_up_to)
            self._waiting[key] = (who, whom, now)
        reported, self._reported = self._reported, dict(self._seconds)
        new = {pair: total - reported.get(pair, 0.0) for pair, total in self._seconds.items()}
        return {pair: seconds for pair, seconds in new.items() if seconds > 0}

    async def _until_deadline(self, awaitable: Awaitable[_T], *, doing: str, failure: str) -> _T:
        deadline = asyncio.timeout(self._deadline_seconds)
        try:
            async with deadline:
                with self._listed(doing):
                    return await awaitable
        except TimeoutError as error:
            if not deadline.expired():
                raise  # a time-out of the stage's own
            meanwhile = self._describe_current() or "nothing else went on"
            raise WaitedTooLong(
                f"{failure % self._deadline_seconds} (schedule.deadline_seconds); "
                f"meanwhile: {meanwhile}"
            ) from error

    @contextlib.contextmanager
    def _counted(self, who: str, whom: str) -> Iterator[None]:
        loop, key = asyncio.get_running_loop(), next(self._ids)
        self._waiting[key] = (who, whom, loop.time())
        try:
            yield
        finally:
            *_, counted_up_to = self._waiting.pop(key)
            self.add(who, whom, loop.time() - counted_up_to)

    @contextlib.contextmanager
    def _listed(self, text: str) -> Iterator[None]:
        key = next(self._ids)
        self._current[key] = (text, asyncio.get_running_loop().time())
        try:
            yield
        finally:
            del self._current[key]

    def _describe_current(self) -> str:
        """Everything that goes on, the longest first, equal entries joined."""
        now = asyncio.get_running_loop().time()
        oldest: dict[str, float] = {}
        counts: collections.Counter[str] = collections.Counter()
        for text, since in self._current.values():
            oldest[text] = min(since, oldest.get(text, since))
            counts[text] += 1
        lines = [
            f"{text} for {now - since:.1f} s" + (f" ({counts[text]} times)" * (counts[text] > 1))
            for text, since in sorted(oldest.items(), key=lambda item: item[1])
        ]
        return "; ".join(lines[:_MAX_LISTED])

"""What joins two stages: an ordered stream with an end and a deadline.

Owns the interface, which a stream between processes will share, and its form in memory. A put
never blocks: whoever produces asks for room first, by admission or by `wait_for_room`, so that
nothing that is already paid for can be stuck in front of a full stream.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pipeline_rl_jax.rollouts.waits import Waits

_T = TypeVar("_T")

# Of the items, in order: those to take, or the name of whom the consumer still waits for.
Choose = Callable[[Sequence[_T]], "Sequence[_T] | str"]


class Stream(Protocol[_T]):
    """Items from one producer to one consumer."""

    def __len__(self) -> int:
        """Items put and not yet taken."""
        ...

    def put(self, item: _T) -> None: ...

    async def take(self, choose: Choose[_T]) -> list[_T] | None:
        """What `choose` picks; None once the stream has ended and it picks nothing."""
        ...

    async def wait_for_room(self, capacity: int, *, whom: str) -> bool:
        """True once fewer than `capacity` items wait; False when the stream has ended."""
        ...

    def close(self) -> None:
        """The producer's end: what is in the stream can still be taken, nothing follows it."""
        ...

    def abort(self) -> None:
        """The run's end: every wait returns at once; what is left comes out of `drain` only."""
        ...

    def drain(self) -> list[_T]:
        """Takes everything that is left, in order."""
        ...


class MemoryStream(Generic[_T]):
    """A `Stream` within one event loop, ordered by `key`, else by arrival."""

    def __init__(
        self,
        waits: Waits,
        *,
        producer: str,
        consumer: str,
        key: Callable[[_T], Any] | None = None,
    ) -> None:
        self._waits = waits
        self._producer = producer
        self._consumer = consumer
        self._key = key
        self._items: list[_T] = []
        self._changed = asyncio.Event()
        self._closed = False
        self._aborted = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _T) -> None:
        if self._closed:
            raise RuntimeError(f"{self._producer} put an item after it closed its stream")
        if self._key is None:
            self._items.append(item)
        else:
            bisect.insort(self._items, item, key=self._key)
        self._changed.set()

    async def take(self, choose: Choose[_T]) -> list[_T] | None:
        """Waits for `choose`, which is asked again at every change of the stream.

        The deadline is on silence: each change starts it anew.
        """
        while not self._aborted:
            chosen = choose(self._items)
            if not isinstance(chosen, str):
                return self._remove(chosen)
            if self._closed:
                return None
            await self._change(who=self._consumer, whom=chosen)
        return None

    def take_now(self, choose: Choose[_T]) -> list[_T] | None:
        """What `choose` picks, None when it picks nothing yet."""
        chosen = choose(self._items)
        return None if isinstance(chosen, str) else self._remove(chosen)

    async def get(self, *, whom: str) -> _T | None:
        """The first item, None once the stream has ended; the consumer waits for `whom`."""
        taken = await self.take(lambda items: items[:1] or whom)
        return taken[0] if taken else None

    async def wait_for_room(self, capacity: int, *, whom: str) -> bool:
        while len(self._items) >= capacity and not self._aborted:
            await self._change(who=self._producer, whom=whom)
        return not self._aborted

    def wake(self) -> None:
        """Asks the consumer's `choose` again: something it depends on has changed."""
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def abort(self) -> None:
        self._aborted = True
        self._changed.set()

    def drain(self) -> list[_T]:
        items, self._items = self._items, []
        self._changed.set()
        return items

    def _remove(self, chosen: Sequence[_T]) -> list[_T]:
        taken = {id(item) for item in chosen}
        self._items = [item for item in self._items if id(item) not in taken]
        self._changed.set()
        return list(chosen)

    async def _change(self, *, who: str, whom: str) -> None:
        # No await between the look at the items and here, so no change can be missed; a set event
        # resumes every waiter even when one of them clears it again at once.
        self._changed.clear()
        await self._waits.within(self._changed.wait(), who=who, whom=whom)

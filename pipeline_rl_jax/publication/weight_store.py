"""The newest complete weights, as generation sees them.

Owns what is visible: a version appears whole or not at all, and versions only grow. How weights get
here is a channel's matter (`device_channel.py`), who looks and when a schedule's.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PublishedWeights:
    """Weights to decode with. Who takes new ones lets go of the old ones."""

    version: int  # optimizer steps applied
    params: Any  # as the engine wants them, on the generation mesh


class WeightStore:
    """Holds the visible version. All methods are thread-safe; none waits for a device.

    `prepare` turns params as they arrive into those of the engine (another layout, fused
    matrices). It runs once per version, in the thread that first looks it up: everything on the
    generation mesh is then dispatched by its own side, and two threads cannot dispatch collectives
    to the same devices in different orders, which would lock them up.
    """

    def __init__(self, *, prepare: Callable[[Any], Any] | None = None):
        self._prepare = prepare
        self._lock = threading.RLock()
        self._visible: PublishedWeights | None = None
        self._is_prepared = False
        self._older: list[weakref.ref] = []  # an array of each version that may still be in use
        self._arrivals: list[tuple[int, futures.Future[None]]] = []
        self._error: BaseException | None = None
        self._swap_seconds = 0.0

    def publish(self, version: int, params: Any) -> None:
        """Makes complete params visible. ValueError unless `version` is the newest so far."""
        with self._lock:
            if self._visible is not None:
                if version <= self._visible.version:
                    raise ValueError(
                        f"weight version {version} follows version {self._visible.version}; "
                        "versions must grow"
                    )
                self._older.append(weakref.ref(jax.tree.leaves(self._visible.params)[0]))
            self._visible = PublishedWeights(version=version, params=params)
            self._is_prepared = False
            arrived = [future for wanted, future in self._arrivals if wanted <= version]
            self._arrivals = [pair for pair in self._arrivals if pair[0] > version]
        for future in arrived:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def latest(self) -> PublishedWeights:
        """The newest version. RuntimeError before the first, and once publication has failed."""
        with self._lock:
            if self._error is not None:
                raise RuntimeError("the weights could not be published") from self._error
            if self._visible is None:
                raise RuntimeError("no weights have been published yet; wait for a version first")
            if self._prepare is not None and not self._is_prepared:
                self._visible = self._prepared(self._visible, self._prepare)
                self._is_prepared = True
            return self._visible

    def arrival(self, version: int) -> futures.Future[None]:
        """A future that is done once `latest` has this version or a newer one.

        It fails when publication does. For coroutines: `asyncio.wrap_future`.
        """
        future: futures.Future[None] = futures.Future()
        with self._lock:
            if self._error is not None:
                future.set_exception(self._error)
            elif self._visible is not None and self._visible.version >= version:
                future.set_result(None)
            else:
                self._arrivals.append((version, future))
        return future

    def wait_for(self, version: int, *, deadline_seconds: float) -> PublishedWeights:
        """`latest()` once it is this version or a newer one; TimeoutError after the deadline."""
        try:
            self.arrival(version).result(deadline_seconds)
        except futures.TimeoutError as error:
            newest = "none" if self._visible is None else f"version {self._visible.version}"
            raise TimeoutError(
                f"waited {deadline_seconds:g} s for the trainer to publish weight version "
                f"{version}; the newest is {newest}"
            ) from error
        return self.latest()

    def has_room(self) -> bool:
        """True when no version older than the visible one is in use any more.

        A version on its way and the visible one are then all there is: two at most.
        """
        with self._lock:
            self._older = [reference for reference in self._older if reference() is not None]
            return not self._older

    def fail(self, error: BaseException) -> None:
        """Publication has ended: lookups and waits raise from now on, with this as the cause."""
        with self._lock:
            self._error = error
            arrivals, self._arrivals = self._arrivals, []
        for _, future in arrivals:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def take_swap_seconds(self) -> float:
        """Host time spent on `prepare` since the last call."""
        with self._lock:
            seconds, self._swap_seconds = self._swap_seconds, 0.0
            return seconds

    def _prepared(
        self, weights: PublishedWeights, prepare: Callable[[Any], Any]
    ) -> PublishedWeights:
        start = time.monotonic()
        params = prepare(weights.params)
        self._swap_seconds += time.monotonic() - start
        return dataclasses.replace(weights, params=params)

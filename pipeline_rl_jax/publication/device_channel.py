"""Weights from the trainer mesh to the generation mesh of the same process.

Owns the cast, the move, and the moment a version is complete. It takes a copy before it returns,
for the trainer gives its params up at the next step. Between processes, another channel is needed.

    trainer mesh                               generation mesh
    params ──cast, gather──▶ copy ──device_put──▶ arriving ──complete──▶ WeightStore
    (publish: dispatched)         (a thread of the channel)
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pipeline_rl_jax.publication.param_check import check_params
from pipeline_rl_jax.publication.weight_store import WeightStore

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.005
_PATIENCE_SECONDS = 30.0  # after that a third version comes in: memory is not worth a stalled run


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parcel:
    version: int
    params: Any  # the cast copy on the trainer mesh; nobody else holds it
    sent_seconds: float  # time.monotonic()


class DeviceChannel:
    """Publishes params without waiting for them; of several that wait, only the newest travels.

    At most two versions live on the generation mesh, the visible one and the next: a version sets
    out when none older than the visible one is in use any more. `publish` belongs to the thread
    that dispatches train steps, or at least between them.
    """

    def __init__(self, store: WeightStore, *, source: Any, target: Any):
        """`source` and `target` are trees of `jax.ShapeDtypeStruct` with shardings: the params as
        the trainer has them, and as generation wants them. Only dtype and sharding may differ."""
        self._store = store
        self._source = source
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        self._cast = _cast_function(source, target)
        self._changed = threading.Condition()
        self._waiting: _Parcel | None = None
        self._closed = False
        self._superseded_versions = 0
        self._dispatch_seconds = self._transfer_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="publication", daemon=True)
        self._thread.start()

    def publish(self, version: int, params: Any) -> None:
        """Sends params on their way and returns. ValueError, and nothing sent, if they do not fit.

        They become `store.latest()` once all of them have arrived, or never if a newer version is
        published before they could set out.
        """
        start = time.monotonic()
        check_params(params, self._source)
        parcel = _Parcel(version=version, params=self._cast(params), sent_seconds=start)
        with self._changed:
            self._superseded_versions += self._waiting is not None
            self._waiting = parcel
            self._dispatch_seconds = time.monotonic() - start
            self._changed.notify_all()

    def take_metrics(self) -> dict[str, float]:
        """Host seconds of the last dispatch, of the last transfer from `publish` to visible, and of
        swaps since the last call; versions that never travelled, so far."""
        with self._changed:
            return {
                "publication/dispatch_seconds": self._dispatch_seconds,
                "publication/transfer_seconds": self._transfer_seconds,
                "publication/swap_seconds": self._store.take_swap_seconds(),
                "publication/superseded_versions": float(self._superseded_versions),
            }

    def close(self) -> None:
        """Ends the channel once what is on its way has arrived; what waits is given up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        try:
            while (parcel := self._next_parcel()) is not None:
                self._deliver(parcel)
                del parcel  # the copy on the trainer mesh is free while the thread waits
        except BaseException as error:  # noqa: BLE001  # raised where weights are looked up
            self._store.fail(error)

    def _next_parcel(self) -> _Parcel | None:
        """The newest parcel once there is one and room for it; None when the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting is not None)
            patience_ends = time.monotonic() + _PATIENCE_SECONDS
            while not (self._closed or self._store.has_room()):
                if time.monotonic() > patience_ends:
                    _log.warning(
                        "a version older than the visible one has been in use for %g s; a third "
                        "set of weights comes in beside them",
                        _PATIENCE_SECONDS,
                    )
                    break
                self._changed.wait(_POLL_SECONDS)
            parcel, self._waiting = self._waiting, None
            return None if self._closed else parcel

    def _deliver(self, parcel: _Parcel) -> None:
        arriving = jax.block_until_ready(jax.device_put(parcel.params, self._shardings))
        self._store.publish(parcel.version, arriving)
        with self._changed:
            self._transfer_seconds = time.monotonic() - parcel.sent_seconds


def _cast_function(source: Any, target: Any) -> Any:
    """The jitted copy on the source mesh, laid out so that its shards are those of the target."""

    def cast(params: Any) -> Any:
        # A copy even where the dtype stays: the source buffers are about to be given up.
        return jax.tree.map(lambda x, like: jnp.copy(x).astype(like.dtype), params, target)

    shardings = jax.tree.map(
        lambda leaf, like: _staging_sharding(leaf.sharding, like.sharding), source, target
    )
    return jax.jit(cast, out_shardings=shardings)


def _staging_sharding(source: NamedSharding, target: NamedSharding) -> NamedSharding:
    """The target's partition on the source's devices, so that every shard is copied directly from
    device to device. Where their number allows no such partition the source's own is kept, and
    `device_put` goes through the host."""
    axes = [name for entry in target.spec if entry for name in _names(entry)]
    sizes = [target.mesh.shape[name] for name in axes]
    devices = np.asarray(source.mesh.devices).ravel()
    if devices.size % math.prod(sizes):
        return source
    grid = devices.reshape(-1, *sizes)
    return NamedSharding(Mesh(grid, ("replica", *axes)), target.spec)


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry

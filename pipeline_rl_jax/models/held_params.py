"""Weights that are only read: on their devices all the time, or in host memory between two uses.

Owns the move. A model that is asked once a step need not hold device memory for the rest of it; the
price is one copy of its weights to the devices for each use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax


class HeldParams:
    """One parameter tree; not thread-safe."""

    def __init__(self, params: Mapping[str, Any], *, offloaded: bool) -> None:
        """Takes `params` over: offloaded, their device buffers are given up here."""
        self._params = params
        self._shardings = None
        if offloaded:
            self._shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
            self._params = jax.device_get(params)
            jax.tree.map(lambda leaf: leaf.delete(), params)

    @contextlib.contextmanager
    def on_devices(self) -> Iterator[Mapping[str, Any]]:
        """The weights where they are computed with; offloaded, only inside the block.

        The block must wait for what it computes with them.
        """
        if self._shardings is None:
            yield self._params
            return
        placed = jax.device_put(self._params, self._shardings)
        try:
            yield placed
        finally:
            jax.tree.map(lambda leaf: leaf.delete(), placed)

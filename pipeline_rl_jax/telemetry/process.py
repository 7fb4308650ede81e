"""What this process takes of the host: resident memory, and programs compiled.

Owns the two measures that must stand still once a run has warmed up.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import jax

_COMPILATION = "/jax/core/compile/backend_compile_duration"
_STATUS = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident memory now; where the system does not tell (not Linux), its peak so far."""
    try:
        pages = int(_STATUS.read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


class CompilationCounter:
    """Counts XLA compilations of this process, from its first use on."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._add)

    @property
    def count(self) -> int:
        return self._count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event == _COMPILATION:
            with self._lock:
                self._count += 1

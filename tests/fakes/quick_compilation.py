"""Train steps that compile in a fraction of the time: little optimised, and each program once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def quick_compilation(directory: Path) -> Iterator[None]:
    """Inside, compiled programs are kept in `directory`, and LLVM is told to hurry."""
    changes = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.2,
    }
    before = {name: jax.config.values[name] for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it remembers whether there is a directory

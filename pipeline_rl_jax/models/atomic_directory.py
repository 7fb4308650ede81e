"""A directory that appears whole or not at all.

Owns the temporary sibling, the final rename and the clean-up after a failure. Not what is in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


def require_free(directory: Path) -> None:
    """ValueError unless `directory` is absent or an empty directory."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        raise ValueError(
            f"output ({directory}) already exists; name another directory or delete it"
        )


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `directory` when the block ends without error.

    It lies beside the final one, so that the rename stays on one file system. ValueError when
    `directory` cannot be made, or holds something already, also when that happened meanwhile.
    """
    require_free(directory)
    directory = directory.absolute()
    partial = directory.parent / f".{directory.name}.partial-{uuid.uuid4().hex}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"output ({directory}) cannot be made: {error.strerror}; name another directory"
        ) from error
    try:
        yield partial
        require_free(directory)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

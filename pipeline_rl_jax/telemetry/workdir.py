"""The directory of a run: which file is where, the resolved config, and writing whole files.

Does not own what other packages put into their subdirectories (checkpoints, profiles).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from pipeline_rl_jax.settings import Settings, SettingsError
from pipeline_rl_jax.settings_parsing import format_settings, parse_settings, settings_to_dict

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths below the directory that `--workdir` names."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def config_text(self) -> Path:
        return self.root / "config.txt"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def superseded_metrics(self) -> Path:
        return self.root / "metrics_superseded.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def timeline(self) -> Path:
        return self.root / "trace.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"


def open_workdir(path: str | os.PathLike[str]) -> Workdir:
    """The directory, made when it is not there. Raises `SettingsError` when nothing can be written.

    The path may hold an earlier attempt of the same run; its files are left alone here.
    """
    root = Path(path).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "is a file" if root.is_file() else f"cannot be made: {error.strerror}"
        raise SettingsError(f"--workdir ({root}) {reason}; name another directory") from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise SettingsError(f"--workdir ({root}) cannot be written to; name another directory")
    return Workdir(root)


@contextlib.contextmanager
def alone_in(workdir: Workdir) -> Iterator[None]:
    """No other process runs in the directory inside. Raises `SettingsError` when one does already.

    The lock is the kernel's: it ends with the process, however that ends. A file system without
    locks gives none, and the run goes on.
    """
    with open(workdir.lock, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise SettingsError(
                f"--workdir ({workdir.root}) is in use by process {file.read().strip() or '?'}, "
                "which writes its metrics and checkpoints there; name another directory, or stop it"
            ) from error
        except OSError as error:
            _log.warning("%s cannot be locked (%s)", workdir.root, error.strerror)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def disk_errors(workdir: Workdir) -> Iterator[None]:
    """Turns the failure of a full disk, wherever it shows inside, into a `SettingsError`."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        if not _says_disk_full(error):
            raise
        raise SettingsError(
            f"--workdir ({workdir.root}) is on a disk that is full; make room, and the same "
            "command goes on from the newest complete checkpoint"
        ) from error


def write_config(workdir: Workdir, settings: Settings) -> None:
    """Writes config.json (which `read_config` reads back) and config.txt (one setting a line).

    A config.json that says something else, left by an earlier attempt, is kept as
    `config_1.json`, `config_2.json`, … so that a resume with other settings stays visible.
    """
    text = json.dumps(settings_to_dict(settings), indent=2, allow_nan=False) + "\n"
    if workdir.config.exists() and workdir.config.read_text() != text:
        keep_earlier(workdir.config)
    write_atomically(workdir.config, text)
    write_atomically(workdir.config_text, format_settings(settings))


def read_config(workdir: Workdir) -> Settings:
    """The settings that `write_config` wrote, checked again."""
    return parse_settings(json.loads(workdir.config.read_text()))


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file's content so that a reader sees the old text or the new, never a part."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def keep_earlier(path: Path) -> None:
    """Moves a file of an earlier attempt, if there is one, to the first free `name_<n>.suffix`."""
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, kept)


def _says_disk_full(error: BaseException | None) -> bool:
    """True when an error, or one that led to it, is that no room or quota was left.

    TensorStore has only the words.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False

"""The directory of a run: which file is where, the resolved config, and writing whole files.

Does not own what other packages put into their subdirectories (checkpoints, profiles).
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from pipeline_rl_jax.settings import Settings, SettingsError
from pipeline_rl_jax.settings_parsing import format_settings, parse_settings, settings_to_dict


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

"""Checkpoints of a run on disk, written by Orbax beside the training.

Owns the directory `checkpoints/`: saving, which checkpoint is good, retention. What is in a
checkpoint is in `items.py`; when one is due is decided in `orchestrate/`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from pipeline_rl_jax.checkpointing.checksums import bit_sums
from pipeline_rl_jax.checkpointing.items import (
    ITEM_NAMES,
    changed_settings,
    describe_tensors,
    join_state,
    params_by_name,
    require_same_tensors,
    split_state,
    tensors_by_name,
)
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.settings_parsing import settings_to_dict
from pipeline_rl_jax.trainer.state import TrainState

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# What Orbax and TensorStore raise for files that are missing, cut short or garbled.
_DAMAGE = (OSError, ValueError, KeyError)
_RECORD_PARTS = ("run", "tensors", "settings")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Restored:
    """A checkpoint, back on the devices."""

    state: TrainState
    metadata: Mapping[str, Any]  # what `save` was given with it


class CheckpointStore:
    """Saves and restores the state of one run. Not thread-safe: one caller at a time."""

    def __init__(self, directory: Path, settings: Settings):
        """Opens the directory, making it if it is not there, and clears what a killed run left
        half written."""
        self._directory = Path(directory).absolute()
        self._settings = settings_to_dict(settings)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=settings.checkpointing.max_to_keep, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, item_names=ITEM_NAMES
        )

    def save(self, state: TrainState, metadata: Mapping[str, Any]) -> bool:
        """Starts to write `state`; False when there is a checkpoint of this version already.

        Returns once the state has been copied to the host, so that the next step may give its
        buffers up; a save still being written is waited for, and its error raised, first. An older
        checkpoint is deleted only once this one is complete. `metadata` is JSON: `version`, which
        is the state's step, and all that is to come back with it.
        """
        version = int(metadata["version"])
        step = int(jax.device_get(state.step))
        if step != version:
            raise ValueError(f"a state of step {step} cannot be saved as version {version}")
        if version in self._manager.all_steps():
            return False
        items = split_state(state)
        record = {
            "run": dict(metadata),
            "tensors": describe_tensors(state),
            "bit_sums": bit_sums(tensors_by_name(state)),
            "settings": self._settings,
        }
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(items["params"]),
            optimizer=ocp.args.StandardSave(items["optimizer"]),
            record=ocp.args.JsonSave(record),
        )
        return self._manager.save(version, args=args, force=True)

    @property
    def versions(self) -> list[int]:
        """Of the checkpoints there are, in order."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Returns once the last save is complete; raises its error if it failed."""
        self._manager.wait_until_finished()

    def restore_latest(self, like: TrainState) -> Restored | None:
        """The newest good checkpoint, laid out as `like`; None when there is none at all.

        `like` holds `jax.ShapeDtypeStruct` with shardings, of whatever mesh this run has. Damaged
        checkpoints are moved aside as `damaged_<version>`, with a line in the log, and the one
        before is taken. ValueError when all are damaged, or when one is of another model.
        """
        self.wait()
        found = _newest_readable(
            self._manager, lambda version: self._restore(version, like), self._directory
        )
        if found is None:
            return None
        version, restored, damaged = found
        for each in damaged:
            _move_aside(self._directory / str(each))
        if damaged:
            self._manager.reload()
        _log.info("restored %s", self._directory / str(version))
        return restored

    def close(self) -> None:
        """Waits for the last save and raises its error if it failed."""
        self._manager.close()

    def _restore(self, version: int, like: TrainState) -> Restored:
        record = _read_record(self._manager, version)
        origin = str(self._directory / str(version))
        require_same_tensors(record["tensors"], describe_tensors(like), origin=origin)
        wanted = split_state(like)
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(wanted["params"]),
            optimizer=ocp.args.StandardRestore(wanted["optimizer"]),
        )
        items = _read_items(self._manager, version, args)
        state = join_state(items, like)
        _check_sums(record, tensors_by_name(state), origin=origin)
        for line in changed_settings(record["settings"], json.loads(json.dumps(self._settings))):
            _log.warning("%s was written with another setting: %s", origin, line)
        return Restored(state=state, metadata=record["run"])


def restore_params(directory: Path, step: int | None = None) -> dict[str, Any]:
    """The weights of a checkpoint as numpy arrays, without the optimizer's moments.

    The newest good one, or that of version `step`. ValueError when there is none.
    """
    directory = Path(directory).absolute()
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory; give the checkpoints/ of a run")
    options = ocp.CheckpointManagerOptions(create=False)  # only reads
    with ocp.CheckpointManager(directory, options=options, item_names=ITEM_NAMES) as manager:
        if step is not None:
            if step not in manager.all_steps():
                there = ", ".join(map(str, sorted(manager.all_steps()))) or "none"
                raise ValueError(f"{directory} has no checkpoint of version {step}; it has {there}")
            return _read_params(manager, step)
        found = _newest_readable(manager, lambda version: _read_params(manager, version), directory)
    if found is None:
        raise ValueError(f"{directory} holds no checkpoint")
    return found[1]


class _DamagedError(ValueError):
    """A checkpoint whose files cannot be read."""


def _newest_readable(
    manager: ocp.CheckpointManager, read: Callable[[int], _T], directory: Path
) -> tuple[int, _T, list[int]] | None:
    """The newest version that can be read, what was read, and the newer ones that could not."""
    damaged: list[int] = []
    for version in sorted(manager.all_steps(), reverse=True):
        try:
            return version, read(version), damaged
        except _DamagedError as error:
            _log.warning("%s", error)
            damaged.append(version)
    if damaged:
        raise ValueError(
            f"{directory} holds {len(damaged)} checkpoint(s), none of which can be read; move it "
            "away to start anew"
        )
    return None


def _read_record(manager: ocp.CheckpointManager, version: int) -> dict[str, Any]:
    args = ocp.args.Composite(record=ocp.args.JsonRestore())
    record = _read_items(manager, version, args)["record"]
    path = Path(manager.directory) / str(version)
    for name in _RECORD_PARTS:
        if not isinstance(record, dict) or not isinstance(record.get(name), dict):
            raise _DamagedError(f"checkpoint {path} is damaged: its record has no {name!r}")
    if record["run"].get("version") != version:
        raise _DamagedError(
            f"checkpoint {path} is damaged: its record is of step {record['run'].get('version')}"
        )
    return record


def _check_sums(
    record: Mapping[str, Any], tensors: Mapping[str, jax.Array | np.ndarray], *, origin: str
) -> None:
    wanted = record.get("bit_sums")
    if wanted is None:
        return  # written before sums were kept
    found = bit_sums(tensors)
    changed = [name for name in found if found[name] != wanted.get(name)]
    if changed:
        raise _DamagedError(
            f"checkpoint {origin} is damaged: {len(changed)} of {len(found)} tensors are not what "
            f"was saved, among them {changed[0]}"
        )


def _read_params(manager: ocp.CheckpointManager, version: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    record = _read_record(manager, version)
    for name, tensor in record["tensors"].items():
        item, *keys = name.split(".")
        if item == "params":
            branch = tree
            for key in keys[:-1]:
                branch = branch.setdefault(key, {})
            branch[keys[-1]] = jax.ShapeDtypeStruct(
                tuple(tensor["shape"]), jnp.dtype(tensor["dtype"])
            )
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    args = ocp.args.Composite(params=ocp.args.PyTreeRestore(tree, restore_args=as_numpy))
    params = _read_items(manager, version, args)["params"]
    origin = str(Path(manager.directory) / str(version))
    _check_sums(record, params_by_name(params), origin=origin)
    return params


def _read_items(manager: ocp.CheckpointManager, version: int, args: ocp.args.Composite) -> Any:
    try:
        return manager.restore(version, args=args)
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0][:300]
        path = Path(manager.directory) / str(version)
        raise _DamagedError(f"checkpoint {path} is damaged: {reason}") from error


def _move_aside(path: Path) -> None:
    """Renames a damaged checkpoint: retention must not count it as one that can be restored."""
    suffixes = ("" if number == 0 else f"_{number}" for number in itertools.count())
    targets = (path.with_name(f"damaged_{path.name}{suffix}") for suffix in suffixes)
    path.rename(next(target for target in targets if not target.exists()))

"""Devices split into a trainer mesh, a generation mesh and, if asked for, others beside them.

Owns which device belongs to which side, the shape and axis names of the meshes, and how the rows
of a batch lie on the trainer mesh. How weights lie on a mesh is in `models/partition.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline_rl_jax.settings import (
    GenerationMeshSettings,
    MeshSettings,
    TrainerMeshSettings,
)

ROW_AXES = ("data", "fsdp")  # rows of a batch are split over both: fsdp is data parallel too


class Meshes(NamedTuple):
    """Trainer and generation are disjoint, or twice the same single device."""

    trainer: Mesh  # axes data, fsdp, tensor
    generation: Mesh  # axes data, tensor
    reference: Mesh  # axes data, fsdp, tensor: the trainer's mesh, or devices of its own over fsdp
    critic: Mesh  # of a critic with weights of its own, likewise
    scoring: Mesh  # of the reward model, likewise; it may share the reference's devices


def configure_virtual_devices(num_devices: int) -> None:
    """Splits the host's CPU into `num_devices` JAX devices; 0 leaves it as it is.

    Must run before anything asks JAX for a device. Raises ValueError when it is too late for that
    and the process has another number of devices.
    """
    if num_devices == 0 or jax.config.values["jax_num_cpu_devices"] == num_devices:
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise ValueError(
            f"meshes.virtual_devices ({num_devices}) must be set before JAX starts, but it has "
            f"started with {jax.device_count()} device(s); call configure_virtual_devices first"
        ) from error


def build_meshes(settings: MeshSettings, devices: Sequence[jax.Device] | None = None) -> Meshes:
    """The meshes, from the devices that `settings` lists by index into `devices`.

    `devices` is `jax.devices()` if not given. Raises ValueError, naming the setting, when an index
    is out of range or listed twice, when the two sides overlap (other than being the same single
    device), and when axis sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sides = {
        "trainer": _pick(devices, settings.trainer_devices, "meshes.trainer_devices"),
        "generation": _pick(devices, settings.generation_devices, "meshes.generation_devices"),
    }
    shared = sorted(set(settings.trainer_devices) & set(settings.generation_devices))
    if shared and not all(len(side) == 1 for side in sides.values()):
        raise ValueError(
            f"meshes.trainer_devices {settings.trainer_devices} and meshes.generation_devices "
            f"{settings.generation_devices} share {shared}; give each side devices of its own, or "
            "both the same single device"
        )
    trainer = _build(settings.trainer, sides["trainer"], "meshes.trainer")
    return Meshes(
        trainer=trainer,
        generation=_build(settings.generation, sides["generation"], "meshes.generation"),
        reference=_build_beside(settings, devices, "reference_devices") or trainer,
        critic=_build_beside(settings, devices, "critic_devices") or trainer,
        scoring=_build_beside(settings, devices, "scoring_devices") or trainer,
    )


def row_sharding(mesh: Mesh, *, row_axis: int = 0) -> NamedSharding:
    """Splits axis `row_axis` of a batch array over the mesh's data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * row_axis, ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def num_row_parts(mesh: Mesh) -> int:
    """How many ways `row_sharding` splits rows; a micro-batch's rows must be a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def _pick(devices: Sequence[jax.Device], indices: Sequence[int], path: str) -> list[jax.Device]:
    wrong = [index for index in indices if not 0 <= index < len(devices)]
    if wrong or not indices:
        raise ValueError(
            f"{path} {tuple(indices)} must be one or more of the {len(devices)} device(s) here, "
            f"numbered from 0; list fewer, or on CPU set meshes.virtual_devices"
        )
    if len(set(indices)) < len(indices):
        raise ValueError(f"{path} {tuple(indices)} must list every device once")
    return [devices[index] for index in indices]


def _build_beside(settings: MeshSettings, devices: Sequence[jax.Device], name: str) -> Mesh | None:
    """The mesh of a frozen model with devices of its own, split over fsdp; None without any."""
    indices, path = getattr(settings, name), f"meshes.{name}"
    if not indices:
        return None
    shared = sorted({*indices} & {*settings.trainer_devices, *settings.generation_devices})
    if shared:
        raise ValueError(
            f"{path} {indices} shares {shared} with the trainer or with generation; give it "
            "devices of its own, or () for the trainer's"
        )
    axes = TrainerMeshSettings(data=1, fsdp=-1, tensor=1)
    return _build(axes, _pick(devices, indices, path), path)


def _build(
    axes: TrainerMeshSettings | GenerationMeshSettings, devices: list[jax.Device], path: str
) -> Mesh:
    sizes = dataclasses.asdict(axes)
    open_axes = [name for name, size in sizes.items() if size == -1]
    taken = math.prod(size for size in sizes.values() if size != -1)
    if len(open_axes) > 1 or taken < 1 or len(devices) % taken:
        raise ValueError(_misfit(path, sizes, len(devices)))
    for name in open_axes:
        sizes[name] = len(devices) // taken
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(_misfit(path, sizes, len(devices)))
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _misfit(path: str, sizes: dict[str, int], num_devices: int) -> str:
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return (
        f"{path} ({shown}) must multiply to the {num_devices} device(s) of {path}_devices; "
        "set one axis to -1 for the rest"
    )

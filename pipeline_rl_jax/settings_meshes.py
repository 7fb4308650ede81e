"""What the settings of the meshes demand of each other and of this process.

Owns devices and axis sizes of every mesh, and how rows must divide over them. What else settings
demand of each other is in `settings_checks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipeline_rl_jax.settings import (
    GenerationMeshSettings,
    Settings,
    SettingsError,
    TrainerMeshSettings,
)


def check_devices(settings: Settings, num_devices: int) -> None:
    """Raises `SettingsError` when a mesh names a device that this process does not have."""
    problems = []
    for name in (
        "trainer_devices",
        "generation_devices",
        "reference_devices",
        "critic_devices",
        "scoring_devices",
    ):
        path, indices = f"meshes.{name}", getattr(settings.meshes, name)
        if max(indices, default=0) >= num_devices:
            known = "index 0 only" if num_devices == 1 else f"indices 0 to {num_devices - 1}"
            problems.append(
                f"{path} {indices} names device {max(indices)} but this process has {num_devices}: "
                f"use {known}, or on CPU set meshes.virtual_devices={max(indices) + 1}"
            )
    if problems:
        raise SettingsError(*problems)


def find_mesh_problems(settings: Settings) -> Iterator[str]:
    """What is wrong with the trainer's and the generation mesh."""
    meshes = settings.meshes
    trainer, generation = meshes.trainer_devices, meshes.generation_devices
    problems = [
        *_check_device_list("meshes.trainer_devices", trainer, meshes.virtual_devices),
        *_check_device_list("meshes.generation_devices", generation, meshes.virtual_devices),
    ]
    if problems:
        yield from problems
        return
    shared = sorted(set(trainer) & set(generation))
    if shared and not (len(trainer) == 1 and trainer == generation):
        yield (
            f"meshes.trainer_devices {trainer} and meshes.generation_devices {generation} share "
            f"{shared}; give each side devices of its own, or both the same single device"
        )
    yield from _check_axes("meshes.trainer", meshes.trainer, len(trainer))
    yield from _check_axes("meshes.generation", meshes.generation, len(generation))


def find_device_problems(settings: Settings) -> Iterator[str]:
    """What is wrong with the devices of the models beside the policy."""
    yield from _check_scoring_devices(settings)
    yield from _check_reference_devices(settings)
    yield from _check_critic_devices(settings)


def num_slot_parts(settings: Settings) -> int:
    """How many ways the generation mesh splits slots; 1 when its axes are wrong."""
    if any(True for _ in find_mesh_problems(settings)):
        return 1
    mesh, num_devices = settings.meshes.generation, len(settings.meshes.generation_devices)
    return num_devices // mesh.tensor if mesh.tensor > 0 else mesh.data


def num_row_parts(settings: Settings) -> int:
    """How many ways the trainer mesh splits rows; 1 when its axes are wrong (reported elsewhere).

    Rows are split over `data` and `fsdp`; an open axis takes what the others leave.
    """
    if any(True for _ in find_mesh_problems(settings)):
        return 1
    mesh, num_devices = settings.meshes.trainer, len(settings.meshes.trainer_devices)
    return num_devices // mesh.tensor if mesh.tensor > 0 else mesh.data * mesh.fsdp


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples around a value, as words: "8 or 16", or "8" when there is none below."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def _check_device_list(path: str, indices: tuple[int, ...], virtual_devices: int) -> Iterator[str]:
    if not indices:
        yield f"{path} () must name at least one device, for example (0,)"
    elif min(indices) < 0:
        yield f"{path} {indices} must hold indices from 0 on"
    elif len(set(indices)) < len(indices):
        yield f"{path} {indices} must name each device once; use {tuple(dict.fromkeys(indices))}"
    elif virtual_devices and max(indices) >= virtual_devices:
        yield (
            f"{path} {indices} must be below meshes.virtual_devices ({virtual_devices}); "
            f"set meshes.virtual_devices={max(indices) + 1} or more, or 0 for real devices"
        )


def _check_axes(
    path: str, axes: TrainerMeshSettings | GenerationMeshSettings, num_devices: int
) -> Iterator[str]:
    sizes = {name: getattr(axes, name) for name in type(axes).__dataclass_fields__}
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    wrong = [name for name, size in sizes.items() if size < -1 or size == 0]
    if wrong:
        yield f"{path}.{wrong[0]} ({sizes[wrong[0]]}) must be 1 or more, or -1 for the rest"
        return
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        yield f"{path} ({shown}) may have -1 once; set {' or '.join(open_axes)} to 1"
        return
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and num_devices % fixed:
        divisors = _divisors(num_devices)
        yield (
            f"{path} ({shown}): the fixed axes take {fixed}, which must divide the {num_devices} "
            f"of {path}_devices; make their product one of {divisors}"
        )
    elif not open_axes and fixed != num_devices:
        yield (
            f"{path} ({shown}) uses {fixed} devices but {path}_devices lists {num_devices}; "
            f"list {fixed}, or set one axis to -1 for the rest"
        )


def _check_scoring_devices(settings: Settings) -> Iterator[str]:
    path, devices = "meshes.scoring_devices", settings.meshes.scoring_devices
    if not devices:
        return
    yield from _check_own_devices(path, devices, settings, whose="the reward model")


def _check_reference_devices(settings: Settings) -> Iterator[str]:
    devices = settings.meshes.reference_devices
    if not devices:
        return
    path = "meshes.reference_devices"
    if not settings.algorithm.needs_reference:
        yield (
            f"{path} {devices} are only used when algorithm.kl_coefficient (0.0) is more than 0, "
            "or with algorithm.loss=dpo; set one of them, or this to ()"
        )
    yield from _check_own_devices(path, devices, settings, whose="the reference policy")
    yield from _check_rows(path, devices, settings)


def _check_critic_devices(settings: Settings) -> Iterator[str]:
    devices = settings.meshes.critic_devices
    if not devices:
        return
    path = "meshes.critic_devices"
    if not settings.algorithm.has_critic_model:
        yield (
            f"{path} {devices} are only used by a critic with weights of its own; set "
            "algorithm.baseline=gae and algorithm.critic=model, or this to ()"
        )
    yield from _check_own_devices(path, devices, settings, whose="the critic")
    yield from _check_rows(path, devices, settings)


def _check_rows(path: str, devices: tuple[int, ...], settings: Settings) -> Iterator[str]:
    rows = settings.trainer.rows_per_micro_batch
    if rows % len(devices):
        yield (
            f"trainer.rows_per_micro_batch ({rows}) must be a multiple of the {len(devices)} "
            f"{path}, which split the rows too; use {nearest_multiples(rows, len(devices))}"
        )


def _check_own_devices(
    path: str, devices: tuple[int, ...], settings: Settings, *, whose: str
) -> Iterator[str]:
    meshes = settings.meshes
    yield from _check_device_list(path, devices, meshes.virtual_devices)
    shared = sorted({*devices} & {*meshes.trainer_devices, *meshes.generation_devices})
    if shared:
        yield (
            f"{path} {devices} shares {shared} with the trainer or with generation; give {whose} "
            "devices of its own, or () for the trainer's"
        )


def _divisors(value: int) -> Sequence[int]:
    return [candidate for candidate in range(1, value + 1) if value % candidate == 0]

"""What the settings of a reward model and of streamed models demand of each other.

Owns the combinations of `reward_model`, `rewards.correctness`, `algorithm.reference_streaming` and
the devices they would need. The range of a number by itself is in `settings_ranges.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pipeline_rl_jax.settings import Settings


def find_scoring_problems(settings: Settings) -> Iterator[str]:
    """One line for every broken constraint."""
    yield from _check_use(settings)
    yield from _check_offloaded(settings)
    yield from _check_widths(settings.reward_model.chunk_widths)


def _check_use(settings: Settings) -> Iterator[str]:
    """What is asked for and would never be looked at, or is needed and missing."""
    source, devices = settings.reward_model.source, settings.meshes.scoring_devices
    if not source and settings.rewards.correctness == "none":
        yield (
            "rewards.correctness (none) leaves nothing to learn from without a reward model; set "
            "reward_model.source, or another correctness"
        )
    if source and settings.rewards.correctness == "none" and not settings.reward_model.weight:
        yield (
            "reward_model.weight (0.0) leaves nothing to learn from when rewards.correctness is "
            "none; use 1.0, or another correctness"
        )
    if not source and devices:
        yield (
            f"meshes.scoring_devices {devices} are only used by a reward model; set "
            "reward_model.source, or this to ()"
        )
    if settings.algorithm.reference_streaming and not settings.algorithm.needs_reference:
        yield (
            "algorithm.reference_streaming (True) streams a reference that nothing asks for; set "
            "algorithm.kl_coefficient above 0, or this to False"
        )


def _check_offloaded(settings: Settings) -> Iterator[str]:
    """Only a model that is asked whole texts at a time can leave its devices in between."""
    path = "meshes.offloaded"
    streaming = {
        "reference": ("algorithm.reference_streaming", settings.algorithm.reference_streaming),
        "reward_model": ("reward_model.streaming", settings.reward_model.streaming),
    }
    used = {
        "reference": settings.algorithm.needs_reference,
        "reward_model": bool(settings.reward_model.source),
    }
    for name in settings.meshes.offloaded:
        if name not in used:
            yield f"{path} ({name!r}) must be some of {', '.join(used)}; remove it"
        elif not used[name]:
            yield f"{path} ({name!r}) names a model that this run does not have; remove it"
        elif streaming[name][1]:
            yield (
                f"{path} ({name!r}) cannot leave its devices while it reads along; set "
                f"{streaming[name][0]}=False, or remove it"
            )


def _check_widths(widths: tuple[int, ...]) -> Iterator[str]:
    if not widths or widths[0] < 1 or any(a >= b for a, b in itertools.pairwise(widths)):
        positive = tuple(sorted({width for width in widths if width > 0})) or (32, 128, 512)
        yield f"reward_model.chunk_widths {widths} must ascend from 1 or more; use {positive}"

"""Writes sample completions as text that a person reads.

Owns the choice of rollouts and the layout of the text. Token ids are left out: the text is what
was decoded once for rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pipeline_rl_jax.records import Completion, Rollout
from pipeline_rl_jax.settings import TelemetrySettings
from pipeline_rl_jax.telemetry.workdir import write_atomically

_RULE = "=" * 80


class SampleWriter:
    """One file `step_000005.txt` every `telemetry.sample_every_steps` steps."""

    def __init__(self, settings: TelemetrySettings, directory: Path) -> None:
        self._num_samples = settings.sample_completions
        self._every_steps = settings.sample_every_steps
        self._directory = directory

    def write(self, step: int, rollouts: Sequence[Rollout]) -> Path | None:
        """Writes samples of the rollouts that step `step` trained on, if it is time for them.

        Returns the path, or None when this step has no samples. Steps 1 and every multiple of
        `sample_every_steps` have them.
        """
        due = step == 1 or step % self._every_steps == 0
        if not (due and self._num_samples and rollouts):
            return None
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"step_{step:06d}.txt"
        write_atomically(path, format_samples(rollouts, step=step, num_samples=self._num_samples))
        return path


def format_samples(rollouts: Sequence[Rollout], *, step: int, num_samples: int) -> str:
    """Text of `num_samples` rollouts, evenly spaced from the first to the last of the batch."""
    chosen = _evenly_spaced(len(rollouts), num_samples)
    header = f"step {step}: {len(chosen)} of {len(rollouts)} completions\n"
    return header + "".join(f"\n{_RULE}\n{_format_rollout(rollouts[i])}" for i in chosen)


def _format_rollout(rollout: Rollout) -> str:
    completion = rollout.completion
    prompt = completion.prompt
    components = "".join(
        f"  {name} {_short(value)}" for name, value in rollout.reward_components.items()
    )
    facts = [
        f"prompt {prompt.prompt_id}, sample {completion.sample_index}"
        + (f", task {prompt.task}" if prompt.task else ""),
        f"reward {_short(rollout.reward)}" + (f"  ={components}" if components else ""),
        f"{completion.num_tokens} tokens, ended by {completion.stop_reason.value}",
        f"weights of step {_format_versions(completion)}",
        *([f"gold answer: {prompt.answer}"] if prompt.answer else []),
    ]
    return "\n".join([*facts, "--- prompt", prompt.text, "--- completion", completion.text, ""])


def _format_versions(completion: Completion) -> str:
    """`7`, or `7 to 9 (3 versions)` when the weights changed under way; `none` without tokens."""
    versions = sorted({int(version) for version in completion.weight_versions})
    if not versions:
        return "none"
    if len(versions) == 1:
        return f"{versions[0]}"
    return f"{versions[0]} to {versions[-1]} ({len(versions)} versions)"


def _evenly_spaced(num_items: int, num_chosen: int) -> list[int]:
    if num_chosen >= num_items:
        return list(range(num_items))
    if num_chosen == 1:
        return [0]
    return [i * (num_items - 1) // (num_chosen - 1) for i in range(num_chosen)]


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)

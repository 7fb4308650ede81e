"""The range of every number in `Settings`, by itself.

Owns minima and maxima. What sections demand of each other is in `settings_checks.py`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

from pipeline_rl_jax.settings import Settings

_AT_LEAST_ONE = (
    "model.attention_block_tokens",
    "model.logprob_chunk_tokens",
    "data.arithmetic.num_operands",
    "data.arithmetic.num_records",
    "data.reasoning_gym.num_records",
    "generation.slots",
    "generation.min_slots",
    "generation.tokens_per_chunk",
    "generation.chunk_period_steps",
    "generation.chunk_trial_steps",
    "generation.max_prompt_tokens",
    "generation.max_new_tokens",
    "generation.prompts_per_prefill",
    "generation.min_cache_tokens",
    "rewards.num_workers",
    "reward_model.rows",
    "reward_model.min_cache_tokens",
    "rewards.code_memory_bytes",
    "algorithm.group_size",
    "algorithm.kl_horizon_rollouts",
    "trainer.batch_rollouts",
    "trainer.epochs",
    "trainer.minibatches",
    "trainer.tokens_per_row",
    "trainer.rows_per_micro_batch",
    "schedule.num_steps",
    "schedule.optimizer_steps_per_round",
    "schedule.scores_in_flight",
    "schedule.overcommit.change_groups",
    "schedule.overcommit.window_steps",
    "publication.every_steps",
    "checkpointing.max_to_keep",
    "evaluation.num_prompts",
    "telemetry.sample_every_steps",
    "profile.start_step",
)
_AT_LEAST_ZERO = (
    "seed",
    "meshes.virtual_devices",
    "data.num_epochs",
    "data.arithmetic.first_operand_tail",
    "generation.temperature",
    "generation.top_k",
    "rewards.overlong_buffer_tokens",
    "reward_model.weight",
    "algorithm.value_coefficient",
    "algorithm.value_clip",
    "algorithm.critic_learning_rate",
    "algorithm.is_lowest",
    "algorithm.entropy_coefficient",
    "algorithm.kl_coefficient",
    "algorithm.max_refill_share",
    "algorithm.aggregation_constant",
    "trainer.learning_rate",
    "trainer.warmup_steps",
    "trainer.weight_decay",
    "schedule.max_lag",
    "schedule.stream_groups",
    "schedule.overcommit.min_groups",
    "schedule.overcommit.max_deferrals",
    "checkpointing.every_steps",
    "evaluation.every_steps",
    "evaluation.max_new_tokens",
    "telemetry.sample_completions",
    "profile.num_steps",
)
_ABOVE_ZERO = (
    "rewards.deadline_seconds",
    "algorithm.std_floor",
    "algorithm.importance_clamp",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.is_highest",
    "algorithm.dpo_beta",
    "algorithm.kl_target_nats",
    "trainer.epsilon",
    "trainer.max_gradient_norm",
    "schedule.deadline_seconds",
)
# Bounds from above, which infinity turns off.
_MAY_BE_INFINITE = ("algorithm.importance_clamp", "algorithm.clip_high", "algorithm.is_highest")
_AT_MOST = {
    "seed": 2**32 - 1,  # what both numpy and Grain accept
    "rewards.num_workers": 1024,
    "meshes.virtual_devices": 512,  # beyond that XLA takes minutes to start
}


_MAX_WHOLE = 2**31 - 1  # of every other whole number: what devices count with
_BEYOND_DEVICES = (
    "rewards.code_memory_bytes",
    "data.arithmetic.min_operand",
    "data.arithmetic.max_operand",
)


def find_range_problems(settings: Settings) -> Iterator[str]:
    """One line for every number out of its range."""

    def value(path: str) -> float:
        return operator.attrgetter(path)(settings)

    beyond = list(_find_beyond(settings))
    if beyond:
        yield from beyond
        return
    for path in _AT_LEAST_ONE:
        if value(path) < 1:
            yield f"{path} ({value(path)}) must be at least 1"
    for path in _AT_LEAST_ZERO:
        if value(path) < 0:
            yield f"{path} ({value(path)}) must be 0 or more"
    for path in _ABOVE_ZERO:
        if value(path) <= 0:
            yield f"{path} ({value(path)}) must be more than 0"
    for path in ("algorithm.gae_gamma", "algorithm.gae_lambda"):
        if not 0 <= value(path) <= 1:
            yield f"{path} ({value(path)}) must be 0 to 1"
    for path in ("trainer.beta1", "trainer.beta2"):
        if not 0 <= value(path) < 1:
            yield f"{path} ({value(path)}) must be at least 0 and below 1"
    if not 0 < settings.generation.top_p <= 1:
        yield f"generation.top_p ({settings.generation.top_p}) must be above 0 and at most 1 (off)"
    if 0 < settings.algorithm.dual_clip <= 1 or settings.algorithm.dual_clip < 0:
        yield f"algorithm.dual_clip ({settings.algorithm.dual_clip}) must be above 1, or 0 for off"


def _find_beyond(settings: Settings) -> Iterator[str]:
    """Numbers that are infinite or so large that nothing could be made of them."""
    for path, number in _find_numbers(settings):
        most = _AT_MOST.get(path, math.inf if path in _BEYOND_DEVICES else _MAX_WHOLE)
        if isinstance(number, int):
            if number > most:
                yield f"{path} ({number}) must be at most {most}"
        elif not (math.isfinite(number) or (path in _MAY_BE_INFINITE and number > 0)):
            yield f"{path} ({number}) must be a finite number"


def _find_numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """(path, value) of every number, those in tuples included."""
    for field in dataclasses.fields(section):
        path, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _find_numbers(value, f"{path}.")
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int | float) and not isinstance(item, bool):
                yield path, item

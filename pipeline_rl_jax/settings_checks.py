"""What settings demand of each other.

Owns the checks that need no model, no data and no device. Each yields one complete line per
problem: path, value, constraint, way out. The range of a number by itself is in
`settings_ranges.py`; combinations inside `algorithm`, of the meshes, and of what scores are in
`settings_algorithm.py`, `settings_meshes.py` and `settings_scoring.py`.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Iterator

from pipeline_rl_jax.settings import (
    GenerationSettings,
    OvercommitSettings,
    Settings,
)
from pipeline_rl_jax.settings_algorithm import find_algorithm_problems
from pipeline_rl_jax.settings_meshes import (
    find_device_problems,
    find_mesh_problems,
    nearest_multiples,
    num_row_parts,
    num_slot_parts,
)
from pipeline_rl_jax.settings_ranges import find_range_problems
from pipeline_rl_jax.settings_scoring import find_scoring_problems


def find_problems(settings: Settings) -> list[str]:
    """Every broken constraint, one line each, in the order of the sections.

    Values out of their own range are reported alone: what sections demand of each other is only
    looked at once every number by itself makes sense.
    """
    problems = list(find_range_problems(settings))
    if problems:
        return problems
    checks = (
        _check_model,
        find_mesh_problems,
        _check_data,
        _check_prompts_and_rows,
        _check_sampling,
        _check_rewards,
        find_scoring_problems,
        _check_groups,
        find_device_problems,
        _check_batch,
        _check_schedule,
        _check_outputs,
    )
    return [problem for check in checks for problem in check(settings)]


def _check_model(settings: Settings) -> Iterator[str]:
    if not settings.model.source:
        yield (
            "model.source ('') must name a model: a Hugging Face directory, a hub id, "
            'or "smollm2-135m"'
        )


def _check_data(settings: Settings) -> Iterator[str]:
    data = settings.data
    if data.source == "files":
        if not data.path:
            yield "data.path ('') must name a file when data.source is files"
        for name in ("problem_field", "answer_field"):
            needed = name == "problem_field" or settings.rewards.correctness != "none"
            if data.format == "mapped" and needed and not getattr(data, name):
                yield f"data.{name} ('') must name a field when data.format is mapped"
    elif data.source == "arithmetic":
        yield from _check_arithmetic(settings)
    elif data.source == "reasoning_gym":
        if not data.reasoning_gym.task:
            yield (
                "data.reasoning_gym.task ('') must name a reasoning-gym data set, "
                'for example "chain_sum"'
            )
        yield from _check_json_object("data.reasoning_gym.options", data.reasoning_gym.options)
    yield from _check_template(settings)


def _check_arithmetic(settings: Settings) -> Iterator[str]:
    task = settings.data.arithmetic
    unknown = sorted(set(task.operations) - set("+-*"))
    if not task.operations or unknown:
        yield f"data.arithmetic.operations ({task.operations!r}) must be some of + - *"
    if task.min_operand > task.max_operand:
        yield (
            f"data.arithmetic.min_operand ({task.min_operand}) must be at most max_operand "
            f"({task.max_operand})"
        )
    if task.first_operand_tail > 4:
        yield (
            f"data.arithmetic.first_operand_tail ({task.first_operand_tail}) must be at most 4, or "
            "nearly every problem begins with the same number"
        )


def _check_json_object(path: str, text: str) -> Iterator[str]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        yield f"{path} ({text!r}) must be a JSON object: {error}; use {{}} for none"
        return
    if not isinstance(value, dict):
        yield f"{path} ({text!r}) must be a JSON object; use {{}} for none"


def _check_template(settings: Settings) -> Iterator[str]:
    data = settings.data
    if data.template == "chat":
        return
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(data.prompt_format) if name}
    except ValueError as error:
        yield f"data.prompt_format ({data.prompt_format!r}) is no format string: {error}"
        return
    if fields != {"problem"}:
        yield (
            f"data.prompt_format ({data.prompt_format!r}) must hold {{problem}} and no other "
            "field; write other braces twice"
        )
    elif problem := _format_problem(data.prompt_format):
        yield f"data.prompt_format ({data.prompt_format!r}) cannot be filled in: {problem}"
    if data.template == "few_shot" and not data.few_shot_examples:
        yield (
            "data.few_shot_examples () must hold at least one when data.template is few_shot; "
            'write each as "problem ||| answer"'
        )
    for index, example in enumerate(data.few_shot_examples):
        if "|||" not in example:
            yield (
                f"data.few_shot_examples[{index}] ({example!r}) must separate problem and answer; "
                'write "problem ||| answer"'
            )


def _format_problem(prompt_format: str) -> str:
    try:
        prompt_format.format(problem="text")
    except (ValueError, LookupError) as error:
        return f"{error}; write plain {{problem}}"
    return ""


def _check_prompts_and_rows(settings: Settings) -> Iterator[str]:
    generation, rows = settings.generation, settings.trainer.tokens_per_row
    buckets = generation.prefill_buckets
    longest = generation.max_prompt_tokens + generation.max_new_tokens
    if rows < longest:
        yield (
            f"trainer.tokens_per_row ({rows}) must hold the longest rollout: "
            f"generation.max_prompt_tokens ({generation.max_prompt_tokens}) + max_new_tokens "
            f"({generation.max_new_tokens}); use {longest} or more"
        )
    if not buckets or buckets[-1] < generation.max_prompt_tokens:
        yield (
            f"generation.prefill_buckets {buckets} must reach max_prompt_tokens "
            f"({generation.max_prompt_tokens}); end it with {generation.max_prompt_tokens}"
        )
    if buckets and (buckets[0] < 1 or any(a >= b for a, b in itertools.pairwise(buckets))):
        positive = tuple(sorted({bucket for bucket in buckets if bucket > 0}))
        yield f"generation.prefill_buckets {buckets} must ascend from 1 or more; use {positive}"


def _check_sampling(settings: Settings) -> Iterator[str]:
    generation, parts = settings.generation, num_slot_parts(settings)
    if generation.temperature == 0:
        yield (
            "generation.temperature (0.0) must be more than 0: greedy rollouts of one prompt are "
            "all the same and teach nothing; use 1.0 (evaluation is greedy by itself)"
        )
    yield from _check_chunk_sizes(generation)
    if any(not text for text in generation.stop_strings):
        yield f"generation.stop_strings {generation.stop_strings} must not hold an empty string"
    if parts > 1 and generation.slots % parts:
        yield (
            f"generation.slots ({generation.slots}) must be a multiple of the {parts} parts that "
            "the generation mesh's data axis splits them into; use "
            f"{nearest_multiples(generation.slots, parts)}"
        )


def _check_chunk_sizes(generation: GenerationSettings) -> Iterator[str]:
    candidates, trials = generation.chunk_candidates, generation.chunk_trial_steps
    if not candidates:
        return
    path = "generation.chunk_candidates"
    if min(candidates) < 1 or len(set(candidates)) < len(candidates):
        yield f"{path} {candidates} must be different numbers of tokens, each at least 1"
    elif len(candidates) == 1:
        yield (
            f"{path} {candidates} leaves nothing to choose; name two or more, or use () and "
            f"generation.tokens_per_chunk={candidates[0]}"
        )
    needed = (trials + 1) * len(candidates)  # the first step of each is not measured
    if generation.chunk_period_steps <= needed:
        yield (
            f"generation.chunk_period_steps ({generation.chunk_period_steps}) must be above "
            f"(chunk_trial_steps + 1) * candidates ({needed}), which the trials take; use "
            f"{needed + 1} or more, or fewer candidates"
        )


def _check_rewards(settings: Settings) -> Iterator[str]:
    rewards, max_new_tokens = settings.rewards, settings.generation.max_new_tokens
    if rewards.correctness == "user" and not re.fullmatch(
        r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", rewards.user_function
    ):
        yield (
            f"rewards.user_function ({rewards.user_function!r}) must name a function when "
            'rewards.correctness is user; write "package.module:function"'
        )
    if rewards.correctness != "user" and rewards.user_function:
        yield (
            f"rewards.user_function ({rewards.user_function!r}) is only called when "
            f"rewards.correctness ({rewards.correctness}) is user; set that, or empty this"
        )
    if rewards.format_weight and not rewards.format_pattern:
        yield (
            f"rewards.format_weight ({rewards.format_weight}) needs rewards.format_pattern; "
            "give a pattern, or set the weight to 0.0"
        )
    try:
        re.compile(rewards.format_pattern)
    except re.error as error:
        yield (
            f"rewards.format_pattern ({rewards.format_pattern!r}) must be a regular "
            f"expression: {error}"
        )
    if rewards.overlong_buffer_tokens >= max_new_tokens:
        yield (
            f"rewards.overlong_buffer_tokens ({rewards.overlong_buffer_tokens}) must be below "
            f"generation.max_new_tokens ({max_new_tokens}); use {max_new_tokens // 4}, or 0 for off"
        )


def _check_groups(settings: Settings) -> Iterator[str]:
    algorithm, batch = settings.algorithm, settings.trainer.batch_rollouts
    if batch % algorithm.group_size:
        yield (
            f"trainer.batch_rollouts ({batch}) must be a multiple of algorithm.group_size "
            f"({algorithm.group_size}); use {nearest_multiples(batch, algorithm.group_size)}"
        )
    max_new_tokens = settings.generation.max_new_tokens
    yield from find_algorithm_problems(
        algorithm,
        max_new_tokens=max_new_tokens,
        updates_per_step=settings.trainer.updates_per_step,
    )
    if batch % settings.trainer.minibatches:
        minibatches = settings.trainer.minibatches
        yield (
            f"trainer.batch_rollouts ({batch}) must be a multiple of trainer.minibatches "
            f"({minibatches}); use {nearest_multiples(batch, minibatches)}"
        )


def _check_batch(settings: Settings) -> Iterator[str]:
    trainer, row_parts = settings.trainer, num_row_parts(settings)
    if trainer.rows_per_micro_batch % row_parts:
        yield (
            f"trainer.rows_per_micro_batch ({trainer.rows_per_micro_batch}) must be a multiple of "
            f"the trainer mesh's data x fsdp ({row_parts}); use "
            f"{nearest_multiples(trainer.rows_per_micro_batch, row_parts)}"
        )
    if trainer.warmup_steps >= settings.schedule.num_steps and trainer.warmup_steps:
        yield (
            f"trainer.warmup_steps ({trainer.warmup_steps}) must be below schedule.num_steps "
            f"({settings.schedule.num_steps}); use {settings.schedule.num_steps // 10}"
        )


def _check_overcommit(overcommit: OvercommitSettings, batch_groups: int) -> Iterator[str]:
    path, most = "schedule.overcommit", overcommit.max_deferrals * batch_groups
    if overcommit.variant == "fixed":
        bounds = (0, overcommit.start_groups, most)
    else:
        bounds = (overcommit.min_groups, overcommit.start_groups, overcommit.max_groups)
        if overcommit.max_groups > most:
            yield (
                f"{path}.max_groups ({overcommit.max_groups}) is more than max_deferrals * groups "
                f"of a batch ({most}), which is all that can be put off; use {most} or less, or "
                "raise max_deferrals"
            )
    if not bounds[0] <= bounds[1] <= bounds[2]:
        yield (
            f"{path}.start_groups ({bounds[1]}) must be {bounds[0]} to {bounds[2]} with variant "
            f"{overcommit.variant}"
        )


def _check_schedule(settings: Settings) -> Iterator[str]:
    schedule, every_steps = settings.schedule, settings.publication.every_steps
    batch_groups = settings.trainer.batch_rollouts // settings.algorithm.group_size
    if schedule.name == "pipeline" and 0 < schedule.stream_groups < batch_groups:
        yield (
            f"schedule.stream_groups ({schedule.stream_groups}) must hold a batch: "
            f"trainer.batch_rollouts / algorithm.group_size ({batch_groups}) groups; use "
            f"{batch_groups} or more, or 0 for one batch"
        )
    if schedule.name == "pipeline" and every_steps > schedule.max_lag + 1:
        yield (
            f"publication.every_steps ({every_steps}) lets weights grow {every_steps - 1} steps "
            f"old, more than schedule.max_lag ({schedule.max_lag}) accepts; use at most "
            f"{schedule.max_lag + 1}, or a max_lag of {every_steps - 1} or more"
        )
    if schedule.name == "oppo":
        yield from _check_overcommit(schedule.overcommit, batch_groups)
    if schedule.deadline_seconds <= settings.rewards.deadline_seconds:
        yield (
            f"schedule.deadline_seconds ({schedule.deadline_seconds}) must be more than "
            f"rewards.deadline_seconds ({settings.rewards.deadline_seconds}), or one slow "
            "verification ends the run"
        )


def _check_outputs(settings: Settings) -> Iterator[str]:
    evaluation, profile = settings.evaluation, settings.profile
    if evaluation.max_new_tokens > settings.generation.max_new_tokens:
        yield (
            f"evaluation.max_new_tokens ({evaluation.max_new_tokens}) must be at most "
            f"generation.max_new_tokens ({settings.generation.max_new_tokens}), which the cache "
            "is sized for; use 0 for the same"
        )
    last = profile.start_step + profile.num_steps - 1
    if profile.num_steps and last > settings.schedule.num_steps:
        yield (
            f"profile.start_step ({profile.start_step}) + profile.num_steps ({profile.num_steps}) "
            f"reach step {last}, past schedule.num_steps ({settings.schedule.num_steps}); use an "
            "earlier start_step or fewer steps"
        )

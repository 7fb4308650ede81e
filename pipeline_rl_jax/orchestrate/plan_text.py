"""The text of `--dry_run`: resolved settings, meshes, sizes, memory and the plan of a step.

Owns estimates of memory. They count what scales with model and batch; temporary buffers of the
compiler come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from pipeline_rl_jax.data.files import expand_paths
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.data.vocabulary import own_tokens
from pipeline_rl_jax.meshes import Meshes, build_meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.orchestrate.critic_model import find_critic
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.orchestrate.parts import check_fit
from pipeline_rl_jax.orchestrate.reference_model import find_reference, held_dtype
from pipeline_rl_jax.orchestrate.scoring_model import (
    ScoringModel,
    find_scoring_model,
    longest_text,
)
from pipeline_rl_jax.rewards.user_function import load_user_function
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.settings_parsing import format_settings

_GIB = 2**30


def describe(settings: Settings) -> str:
    """Everything a person wants to check before a long run. ValueError for what cannot work."""
    directory = prepare_model(settings.model.source)
    config = read_config(directory)
    meshes = build_meshes(settings.meshes)
    actor = Path(settings.model.tokenizer or directory).expanduser()
    check_fit(settings, config, meshes, tokenizer=load_tokenizer(actor))
    _check_files(settings)
    reference = find_reference(settings, directory, policy=config, meshes=meshes)
    reward_model = find_scoring_model(settings, actor, policy=config, meshes=meshes)
    critic = find_critic(settings, directory, policy=config, meshes=meshes)
    sections = {
        "settings": format_settings(settings).splitlines(),
        "model": _model_lines(config),
        "reward model": _reward_model_lines(settings, reward_model, meshes),
        "meshes": _mesh_lines(meshes),
        "memory per device, at most": _memory_lines(
            settings,
            config,
            meshes,
            reference=reference.config if reference else None,
            reward_model=reward_model,
            critic=critic.config if critic else None,
        ),
        "one step": _step_lines(settings),
    }
    blocks = (
        "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
        for title, lines in sections.items()
    )
    return "\n\n".join(blocks)


def _check_files(settings: Settings) -> None:
    """ValueError for a path of data that names no file, or a user's function that is none; what
    is in the files is not read."""
    if settings.data.source == "files":
        expand_paths("data.path", settings.data.path)
    if settings.evaluation.path:
        expand_paths("evaluation.path", settings.evaluation.path)
    if settings.rewards.correctness == "user":
        load_user_function(settings.rewards.user_function)


def trainer_bytes(
    settings: Settings,
    config: ModelConfig,
    meshes: Meshes,
    *,
    reference: ModelConfig | None = None,
) -> dict[str, int]:
    """Bytes on each trainer device. Weights and moments are split over fsdp and tensor.

    `reference` is the model of a reference policy, which is counted if it has no own devices.
    """
    parts = meshes.trainer.shape["fsdp"] * meshes.trainer.shape["tensor"]
    weights = config.num_parameters // parts
    rows = settings.trainer.rows_per_micro_batch // math.prod(
        meshes.trainer.shape[axis] for axis in ("data", "fsdp")
    )
    tokens = max(1, rows) * settings.trainer.tokens_per_row
    compute = _item_bytes(settings.model.compute_dtype)
    kept = config.num_layers * config.width  # a layer's input, kept for its recomputation
    if settings.model.remat != "full":
        kept = config.num_layers * (6 * config.width + 3 * config.mlp_width)
    chunk = min(tokens, settings.model.logprob_chunk_tokens)
    sizes = {
        "weights": weights * _item_bytes(settings.model.param_dtype),
        "AdamW moments (float32)": 2 * weights * 4,
        "gradients (float32)": 4 * weights,
        "activations of a micro-batch": tokens * kept * compute,
        "logits of a chunk": 3 * 4 * chunk * config.vocabulary_size,
    }
    if reference and meshes.reference is meshes.trainer:
        sizes |= reference_bytes(settings, reference, meshes)
    return sizes


def reference_bytes(settings: Settings, config: ModelConfig, meshes: Meshes) -> dict[str, int]:
    """Bytes of the frozen weights on each device of the reference mesh, and of what it has read."""
    parts = meshes.reference.shape["fsdp"] * meshes.reference.shape["tensor"]
    weights = config.num_parameters // parts * _item_bytes(held_dtype(settings))
    sizes = {"reference weights": weights}
    if settings.algorithm.reference_streaming:
        cache = _rows_cache_values(settings, config, meshes.reference, longest=config.max_positions)
        sizes["reference KV cache"] = cache * _item_bytes(settings.model.compute_dtype)
    return sizes


def critic_bytes(settings: Settings, config: ModelConfig, meshes: Meshes) -> dict[str, int]:
    """Bytes of a critic's own model on each device of its mesh, without its activations."""
    weights = config.num_parameters // (meshes.critic.shape["fsdp"] * meshes.critic.shape["tensor"])
    return {
        "critic weights": weights * _item_bytes(settings.model.param_dtype),
        "critic AdamW moments (float32)": 2 * weights * 4,
        "critic gradients (float32)": 4 * weights,
    }


def scoring_bytes(
    settings: Settings, model: ScoringModel, meshes: Meshes, *, policy: ModelConfig
) -> dict[str, int]:
    """Bytes of the reward model on each device of the scoring mesh, rows at their full length."""
    parts = meshes.scoring.shape["fsdp"] * meshes.scoring.shape["tensor"]
    weights = model.num_parameters // parts * _item_bytes(settings.reward_model.param_dtype)
    sizes = {"reward model weights": weights}
    if settings.reward_model.streaming:
        longest = longest_text(settings, policy)
        cache = _rows_cache_values(settings, model.config, meshes.scoring, longest=longest)
        sizes["reward model KV cache"] = cache * _item_bytes(settings.reward_model.cache_dtype)
    return sizes


def _rows_cache_values(
    settings: Settings, config: ModelConfig, mesh: jax.sharding.Mesh, *, longest: int
) -> int:
    """Keys and values of the rows of a streamed model, on each device; one row is a spare."""
    generation, heads = settings.generation, config.num_kv_heads
    heads = heads // mesh.shape["tensor"] if heads % mesh.shape["tensor"] == 0 else heads
    longest = min(longest, generation.max_prompt_tokens + generation.max_new_tokens)
    rows = settings.reward_model.rows + 1
    return 2 * config.num_layers * rows * heads * longest * config.head_width


def generation_bytes(settings: Settings, config: ModelConfig, meshes: Meshes) -> dict[str, int]:
    """Bytes on each generation device, every slot at its full length, two weight versions."""
    generation, shape = settings.generation, meshes.generation.shape
    heads = config.num_kv_heads
    heads = heads // shape["tensor"] if heads % shape["tensor"] == 0 else heads
    context = min(generation.max_prompt_tokens + generation.max_new_tokens, config.max_positions)
    slots = generation.slots // shape["data"]
    cache = 2 * config.num_layers * slots * heads * context * config.head_width
    weights = config.num_parameters // shape["tensor"] * _item_bytes(generation.compute_dtype)
    return {
        "weights, visible and arriving": 3 * weights,  # the arriving one in both layouts
        "KV cache": cache * _item_bytes(generation.cache_dtype),
        "logits": 4 * slots * config.vocabulary_size,
    }


def _model_lines(config: ModelConfig) -> Iterator[str]:
    yield f"{config.family}, {config.num_parameters:,} parameters"
    yield (
        f"{config.num_layers} layers, width {config.width}, MLP {config.mlp_width}, "
        f"{config.num_query_heads} query and {config.num_kv_heads} KV heads of "
        f"{config.head_width}, vocabulary {config.vocabulary_size}, "
        f"context {config.max_positions}"
    )


def _reward_model_lines(
    settings: Settings, model: ScoringModel | None, meshes: Meshes
) -> Iterator[str]:
    reward_model = settings.reward_model
    if model is None:
        yield "none"
        return
    yield f"{reward_model.source}: {model.config.family}, {model.num_parameters:,} parameters"
    own = "devices of its own" if meshes.scoring is not meshes.trainer else "the trainer's devices"
    yield f"on {own}: {', '.join(str(device) for device in meshes.scoring.devices.ravel())}"
    if reward_model.streaming:
        widths = ", ".join(map(str, reward_model.chunk_widths))
        yield f"streamed: {reward_model.rows} texts at once, {widths} tokens of each in a call"
    else:
        again = "" if model.tokens_of is own_tokens else ", encoded again for its own tokenizer"
        yield f"whole texts, {reward_model.rows} at once{again}"
    yield f"its score has weight {reward_model.weight} in the reward"


def _mesh_lines(meshes: Meshes) -> Iterator[str]:
    for name, mesh in meshes._asdict().items():
        if name != "trainer" and mesh is meshes.trainer:
            continue
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        devices = ", ".join(str(device) for device in mesh.devices.ravel())
        yield f"{name}: {axes} on {devices}"
    shared = set(meshes.trainer.devices.ravel()) & set(meshes.generation.devices.ravel())
    if shared:
        yield "both sides share this device: they take turns on it"


def _memory_lines(
    settings: Settings,
    config: ModelConfig,
    meshes: Meshes,
    *,
    reference: ModelConfig | None,
    reward_model: ScoringModel | None,
    critic: ModelConfig | None,
) -> Iterator[str]:
    sides = {
        "trainer": trainer_bytes(settings, config, meshes, reference=reference),
        "generation": generation_bytes(settings, config, meshes),
    }
    if reference and meshes.reference is not meshes.trainer:
        sides["reference"] = reference_bytes(settings, reference, meshes)
    if reward_model:
        side = "trainer" if meshes.scoring is meshes.trainer else "scoring"
        sizes = scoring_bytes(settings, reward_model, meshes, policy=config)
        sides[side] = sides.get(side, {}) | sizes
    if critic:
        side = "trainer" if meshes.critic is meshes.trainer else "critic"
        sides[side] = sides.get(side, {}) | critic_bytes(settings, critic, meshes)
    for side, sizes in sides.items():
        yield f"{side}: {sum(sizes.values()) / _GIB:.2f} GiB"
        for name, size in sizes.items():
            yield f"  {name}: {size / _GIB:.2f} GiB"
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        yield f"each device has {limit / _GIB:.2f} GiB"


def _step_lines(settings: Settings) -> Iterator[str]:
    trainer, algorithm, schedule = settings.trainer, settings.algorithm, settings.schedule
    generation = settings.generation
    groups = trainer.batch_rollouts // algorithm.group_size
    yield (
        f"{generation.slots} slots decode {generation.tokens_per_chunk} tokens between two looks "
        "for new weights"
    )
    yield f"{trainer.batch_rollouts} rollouts: {groups} prompts with {algorithm.group_size} each"
    yield (
        f"rows of {trainer.tokens_per_row} tokens, {trainer.rows_per_micro_batch} rows a "
        "micro-batch"
    )
    yield f"loss {algorithm.loss}, baseline {algorithm.baseline}, sum by {algorithm.aggregation}"
    if trainer.updates_per_step > 1:
        yield f"{trainer.epochs} epochs of {trainer.minibatches} updates each"
    if algorithm.baseline == "gae":
        yield (
            f"GAE with gamma {algorithm.gae_gamma} and lambda {algorithm.gae_lambda}, critic: "
            + ("a head on the policy" if algorithm.critic == "head" else "a model of its own")
        )
    if algorithm.kl_coefficient:
        yield (
            f"KL to the reference ({algorithm.reference or 'the starting weights'}) in the "
            f"{algorithm.kl_in}, {algorithm.kl_coefficient} x {algorithm.kl_estimator}"
        )
        if algorithm.reference_streaming:
            yield "the reference reads completions while they are written"
    yield f"{schedule.num_steps} optimizer steps, schedule {schedule.name}"
    if schedule.name == "pipeline":
        yield f"at most {schedule.max_lag} steps of lag, beyond that: {schedule.beyond_max_lag}"
    if schedule.name == "oppo":
        overcommit = schedule.overcommit
        yield (
            f"{groups} groups a step and at first {overcommit.start_groups} more in flight "
            f"({overcommit.variant}), each put off by at most {overcommit.max_deferrals} steps"
        )


def _item_bytes(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize

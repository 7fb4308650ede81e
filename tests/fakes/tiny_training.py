"""A model that trains in milliseconds, batches for it, and trainers on parts of eight devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pipeline_rl_jax.meshes import Meshes, build_meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.loading import random_params
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.models.reward_model import body_config
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import (
    GenerationMeshSettings,
    MeshSettings,
    Settings,
    TrainerMeshSettings,
)
from pipeline_rl_jax.trainer.critic import Critic, critic_settings
from pipeline_rl_jax.trainer.optimizer import build_optimizer
from pipeline_rl_jax.trainer.state import create_state
from pipeline_rl_jax.trainer.trainer import Trainer
from tests.fakes.settings import make_settings

TINY = ModelConfig(
    family="qwen2",
    vocabulary_size=64,
    width=32,
    mlp_width=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_width=8,
    max_positions=128,
    rope_theta=10_000.0,
    qkv_bias=True,
    tied_embeddings=True,
)
TOKENS_PER_ROW = 32


def tiny_meshes(
    *,
    trainer_devices: tuple[int, ...] = (0,),
    generation_devices: tuple[int, ...] = (7,),
    critic_devices: tuple[int, ...] = (),
    trainer: tuple[int, int, int] = (1, -1, 1),
    generation: tuple[int, int] = (-1, 1),
) -> Meshes:
    """Meshes of axis sizes (data, fsdp, tensor) and (data, tensor)."""
    return build_meshes(
        MeshSettings(
            virtual_devices=8,
            trainer_devices=trainer_devices,
            generation_devices=generation_devices,
            reference_devices=(),
            critic_devices=critic_devices,
            offloaded=(),
            scoring_devices=(),
            trainer=TrainerMeshSettings(data=trainer[0], fsdp=trainer[1], tensor=trainer[2]),
            generation=GenerationMeshSettings(data=generation[0], tensor=generation[1]),
        )
    )


def tiny_settings(
    *, model: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **sections
) -> Settings:
    """Float32, four rows a micro-batch, a learning rate that shows.

    The large epsilon keeps Adam's first step in proportion to the gradient. It would be the
    gradient's sign otherwise, which turns rounding into a whole step where a gradient is nearly 0.
    """
    small = {"compute_dtype": "float32", "remat": "none", "logprob_chunk_tokens": 64}
    rows = {"tokens_per_row": TOKENS_PER_ROW, "rows_per_micro_batch": 4, "learning_rate": 1e-2}
    rows["epsilon"] = 1e-2
    return make_settings(model=small | (model or {}), trainer=rows | (trainer or {}), **sections)


def tiny_trainer(
    settings: Settings, meshes: Meshes, *, config: ModelConfig = TINY, seed: int = 0
) -> Trainer:
    """A trainer at step 0 with random weights, and other ones for its critic if it has one."""
    optimizer = build_optimizer(settings.trainer, num_steps=settings.num_updates)
    params = random_params(
        config,
        seed=seed,
        dtype=settings.model.param_dtype,
        shardings=param_shardings(config, meshes.trainer),
    )
    state = create_state(
        params,
        optimizer,
        config=config,
        mesh=meshes.trainer,
        value_head=settings.algorithm.learns_values,
    )
    critic = None
    if settings.algorithm.has_critic_model:
        critic = tiny_critic(settings, meshes, config=config, seed=seed + 1)
    return Trainer(
        config, settings, optimizer=optimizer, mesh=meshes.trainer, state=state, critic=critic
    )


def tiny_critic(
    settings: Settings, meshes: Meshes, *, config: ModelConfig = TINY, seed: int = 1
) -> Critic:
    """A critic with random weights whose value head starts at zero."""
    body = body_config(config)
    own = critic_settings(settings)
    optimizer = build_optimizer(own.trainer, num_steps=own.num_updates)
    params = random_params(
        body,
        seed=seed,
        dtype=settings.model.param_dtype,
        shardings=param_shardings(body, meshes.critic),
    )
    state = create_state(params, optimizer, config=body, mesh=meshes.critic, value_head=True)
    return Critic(body, settings, optimizer=optimizer, mesh=meshes.critic, state=state)


def tiny_batch(num_rows: int = 8, *, padded_rows: int | None = None, seed: int = 0) -> PackedBatch:
    """`num_rows` rows of three rollouts each, lengths 12, 10 and 6, prompts of 3; then padding."""
    generator = np.random.default_rng(seed)
    lengths, prompt_tokens = np.array([12, 10, 6]), 3
    shape = (num_rows, TOKENS_PER_ROW)
    segments = np.zeros(TOKENS_PER_ROW, np.int32)
    segments[: lengths.sum()] = np.repeat([1, 2, 3], lengths)
    positions = np.zeros(TOKENS_PER_ROW, np.int32)
    positions[: lengths.sum()] = np.concatenate([np.arange(length) for length in lengths])
    segment_ids = np.broadcast_to(segments, shape)
    loss_mask = np.broadcast_to((segments > 0) & (positions >= prompt_tokens), shape)
    first = 3 * np.arange(num_rows, dtype=np.int32)[:, None]
    advantages = generator.normal(size=(num_rows, 3)).astype(np.float32)
    batch = PackedBatch(
        token_ids=generator.integers(0, TINY.vocabulary_size, shape, np.int32),
        segment_ids=segment_ids,
        positions=np.broadcast_to(positions, shape),
        loss_mask=loss_mask,
        sequence_index=np.where(segment_ids > 0, first + segment_ids - 1, -1),
        behaviour_logprobs=_masked(generator.uniform(-5, -3, shape), loss_mask),
        advantages=_masked(np.repeat(advantages, 11, axis=1)[:, :TOKENS_PER_ROW], loss_mask),
        returns=np.zeros(shape, np.float32),
        reference_logprobs=np.zeros(shape, np.float32),
        weight_versions=np.where(loss_mask, 0, -1).astype(np.int32),
        num_sequences=np.int32(3 * num_rows),
        num_rows=np.int32(num_rows),
    )
    return batch if padded_rows is None else pad_rows(batch, padded_rows)


def pad_rows(batch: PackedBatch, num_rows: int) -> PackedBatch:
    """The batch with empty rows added up to `num_rows`."""
    empty = {"sequence_index": -1, "weight_versions": -1}

    def pad(name: str, array: np.ndarray) -> np.ndarray:
        missing = num_rows - array.shape[0]
        return np.pad(array, ((0, missing), (0, 0)), constant_values=empty.get(name, 0))

    arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(PackedBatch)}
    return PackedBatch(
        **{name: pad(name, array) if np.ndim(array) else array for name, array in arrays.items()}
    )


def _masked(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, values, 0.0).astype(np.float32)

"""The models of a run that are only asked: the reward model, the reference policy, the critic.

Owns how each of them is used, whole texts at a time or streamed, and on which mesh with which
lock. Where their weights come from is in `scoring_model.py` and `reference_model.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from pipeline_rl_jax.models.chunk_readouts import (
    Readout,
    logprobs_readout,
    score_so_far,
    values_of_tokens,
)
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.orchestrate.parts import Parts
from pipeline_rl_jax.orchestrate.scoring_model import ScoringModel, longest_text
from pipeline_rl_jax.preprocess.reference import ReferencePolicy
from pipeline_rl_jax.rewards.reward_model_scorer import RewardModelOnDevice, RewardModelScorer
from pipeline_rl_jax.rewards.scorer import WeightedScorer
from pipeline_rl_jax.rewards.stream_readers import CRITIC, REFERENCE, REWARD_MODEL, StreamReaders
from pipeline_rl_jax.rewards.streamed_model import StreamedModel, StreamShape
from pipeline_rl_jax.rewards.streamed_reward import StreamedReward
from pipeline_rl_jax.rewards.streaming import StreamedTexts
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.trainer.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FrozenModels:
    """With their weights, ready to be asked."""

    reference: ReferencePolicy | None  # None when there is none, or when it is streamed
    readers: StreamReaders  # all that is streamed, perhaps nothing
    whole_texts: RewardModelScorer | None  # the reward model when it is not streamed
    critic: StreamedTexts | None  # when it is streamed: its weights change with every step


def load_frozen_models(parts: Parts, state: TrainState | None = None) -> FrozenModels:
    """Reads the weights from their sources; the reward model becomes a component of the scorer.

    A streamed critic begins with those of `state`, which only it needs.
    """
    settings = parts.settings
    streamed: dict[str, StreamedTexts] = {}
    whole_texts = None
    if parts.reward_model is not None and settings.reward_model.streaming:
        streamed[REWARD_MODEL] = _stream_reward_model(parts, parts.reward_model)
    elif parts.reward_model is not None:
        whole_texts = _load_whole_texts(parts, parts.reward_model)
    if parts.reference is not None and settings.algorithm.reference_streaming:
        streamed[REFERENCE] = _stream_reference(parts)
    if settings.algorithm.value_streaming:
        assert state is not None
        streamed[CRITIC] = _stream_critic(parts, state)
    readers = StreamReaders(streamed)
    if parts.reward_model is not None:
        component = whole_texts or StreamedReward(readers)
        weighted = WeightedScorer(component, settings.reward_model.weight)
        parts.scorer.add(REWARD_MODEL, weighted)
    reference = None if REFERENCE in readers.names else parts.load_reference()
    return FrozenModels(
        reference=reference,
        readers=readers,
        whole_texts=whole_texts,
        critic=streamed.get(CRITIC),
    )


def stream_shape(settings: Settings, policy: ModelConfig) -> StreamShape:
    """The shapes of every streamed model; dtypes are those of the reward model."""
    model = settings.reward_model
    return StreamShape(
        rows=model.rows,
        max_tokens=longest_text(settings, policy),
        chunk_widths=model.chunk_widths,
        min_cache_tokens=model.min_cache_tokens,
        cache_dtype=model.cache_dtype,
        compute_dtype=model.compute_dtype,
    )


def _stream_reward_model(parts: Parts, model: ScoringModel) -> StreamedTexts:
    mesh = parts.meshes.scoring
    return _stream(
        parts,
        model.config,
        model.load(parts.settings, mesh=mesh),
        readout=score_so_far,
        mesh=mesh,
        shape=stream_shape(parts.settings, parts.config),
    )


def _stream_reference(parts: Parts) -> StreamedTexts:
    """It reads in the dtype in which it would score whole batches."""
    assert parts.reference is not None
    settings, config, mesh = parts.settings, parts.reference.config, parts.meshes.reference
    dtype = settings.model.compute_dtype
    readout = logprobs_readout(
        config,
        temperature=settings.generation.temperature,
        logprob_chunk_tokens=settings.model.logprob_chunk_tokens,
    )
    shape = dataclasses.replace(
        stream_shape(settings, parts.config), cache_dtype=dtype, compute_dtype=dtype
    )
    params = parts.reference.load(settings, mesh=mesh)
    return _stream(parts, config, params, readout=readout, mesh=mesh, shape=shape, per_token=True)


def _stream_critic(parts: Parts, state: TrainState) -> StreamedTexts:
    """It reads in the dtype in which it would value whole batches."""
    settings, meshes = parts.settings, parts.meshes
    dtype = settings.model.compute_dtype
    own = parts.critic is not None
    assert state.critic is not None or not own
    return _stream(
        parts,
        parts.critic.config if parts.critic else parts.config,
        state.critic.params if state.critic else state.params,
        readout=values_of_tokens,
        mesh=meshes.critic if own else meshes.trainer,
        shape=dataclasses.replace(
            stream_shape(settings, parts.config), cache_dtype=dtype, compute_dtype=dtype
        ),
        per_token=True,
    )


def _stream(
    parts: Parts,
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    readout: Readout,
    mesh: Mesh,
    shape: StreamShape,
    per_token: bool = False,
) -> StreamedTexts:
    model = StreamedModel(
        config, params, readout=readout, shape=shape, mesh=mesh, order=parts.order_of(mesh)
    )
    return StreamedTexts(model, per_token=per_token)


def _load_whole_texts(parts: Parts, model: ScoringModel) -> RewardModelScorer:
    settings, mesh = parts.settings, parts.meshes.scoring
    on_device = RewardModelOnDevice(
        model.config,
        model.load(settings, mesh=mesh),
        mesh=mesh,
        rows=settings.reward_model.rows,
        compute_dtype=settings.reward_model.compute_dtype,
        order=parts.order_of(mesh),
        offloaded="reward_model" in settings.meshes.offloaded,
    )
    return RewardModelScorer(on_device, tokens_of=model.tokens_of)

"""The stages of a real run: thin adapters from the packages to the protocols of `stages.py`.

Owns which thread works on which mesh: one for generation, one for training, one for preprocessing,
in which the reference policy works too; models that read what is being written have threads of
their own (`rewards/stream_readers.py`). Where several threads dispatch to the trainer's devices
(training, publication, reference, reward model), `order` keeps them from doing so at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline_rl_jax.generation.batcher import ContinuousBatcher
from pipeline_rl_jax.models.value_head import without_value_head
from pipeline_rl_jax.orchestrate.stages import PreparedBatch
from pipeline_rl_jax.orchestrate.threads import StageThread
from pipeline_rl_jax.preprocess.batches import assemble
from pipeline_rl_jax.preprocess.reference import ReferencePolicy
from pipeline_rl_jax.preprocess.refill import RefillRule
from pipeline_rl_jax.publication.device_channel import DeviceChannel
from pipeline_rl_jax.publication.weight_store import PublishedWeights, WeightStore
from pipeline_rl_jax.records import Chunk, Completion, Group, PackedBatch, Prompt, Rollout
from pipeline_rl_jax.rewards.score import Score, ScoringFailure
from pipeline_rl_jax.rewards.scorer import CompletionScorer
from pipeline_rl_jax.rewards.stream_readers import CRITIC, REFERENCE, REWARD_MODEL, StreamReaders
from pipeline_rl_jax.rewards.streaming import StreamedTexts
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.telemetry.profile import ProfileWindow
from pipeline_rl_jax.telemetry.spans import span
from pipeline_rl_jax.trainer.trainer import Trainer


class EngineGeneration:
    """`GenerationStage` over a batcher."""

    def __init__(self, batcher: ContinuousBatcher, thread: StageThread) -> None:
        self._batcher = batcher
        self._thread = thread

    @property
    def num_open_samples(self) -> int:
        return self._batcher.num_open_samples

    @property
    def num_live(self) -> int:
        return self._batcher.num_live

    def admit(self, prompt: Prompt, group_size: int) -> None:
        self._batcher.admit(prompt, group_size)

    async def advance(self, weights: Any) -> Sequence[Completion]:
        return await self._thread.run(self._batcher.advance, weights)

    def take_chunks(self) -> Sequence[Chunk]:
        return self._batcher.take_chunks()

    def cancel_all(self) -> None:
        self._batcher.cancel_all()


class RewardScoring:
    """`ScoringStage` over the configured reward and the models that read along.

    `readers` are asked for every completion exactly once, `REFERENCE` among them or not.
    """

    def __init__(self, scorer: CompletionScorer, readers: StreamReaders) -> None:
        self._scorer = scorer
        self._readers = readers

    def read(self, chunks: Sequence[Chunk]) -> None:
        self._readers.read(chunks)

    async def score(self, completion: Completion) -> Rollout | ScoringFailure:
        with span("reward", track="rewards"):
            readouts = await self._readers.finish(completion)
            known = {}
            if REWARD_MODEL in readouts:
                known[REWARD_MODEL] = Score(value=float(readouts[REWARD_MODEL]))
            scored = await self._scorer.score(completion, known=known)
        if isinstance(scored, ScoringFailure):
            return scored
        return Rollout(
            completion=completion,
            reward=scored.reward,
            reward_components=scored.components,
            reference_logprobs=readouts.get(REFERENCE),
            values=readouts.get(CRITIC),
        )

    def forget(self, completion: Completion) -> None:
        self._readers.forget(completion)

    def forget_all(self) -> None:
        self._readers.forget_all()


class BatchPreprocess:
    """`PreprocessStage`: packing, reference logprobs if a coefficient asks for them, advantages."""

    def __init__(
        self, settings: Settings, thread: StageThread, *, reference: ReferencePolicy | None = None
    ) -> None:
        self._settings = settings
        self._thread = thread
        self._reference = reference
        self._refill = RefillRule(settings)
        self._refused: list[Group] = []  # since the batch before; measured, then forgotten

    def refuse(self, group: Group) -> str | None:
        reason = self._refill.refuse(group)
        if reason is not None:
            self._refused.append(group)
        return reason

    async def assemble(self, groups: Sequence[Group], version: int) -> PreparedBatch:
        del version
        refused, self._refused = self._refused, []
        metrics = {
            "group/refused_groups": float(len(refused)),
            "group/kept_unwillingly_groups": float(self._refill.take_num_kept_unwillingly()),
        }
        prepared = await self._thread.run(self._assemble, groups, refused)
        return dataclasses.replace(prepared, metrics={**prepared.metrics, **metrics})

    def _assemble(self, groups: Sequence[Group], refused: Sequence[Group]) -> PreparedBatch:
        with span("preprocess"):
            result = assemble(
                groups,
                self._settings,
                refused=refused,
                reference_logprobs=self._score if self._reference else None,
            )
        return PreparedBatch(
            batch=result.batch,
            dropped={reason.value: count for reason, count in result.num_dropped.items() if count},
            metrics=result.statistics,
        )

    def _score(self, batch: PackedBatch) -> np.ndarray:
        assert self._reference is not None
        with span("reference"):
            return self._reference.logprobs(batch)


class MeshTraining:
    """`TrainingStage` over a trainer; the profiler's window opens and closes around its steps.

    `critic` reads completions with the critic's weights of the moment: new ones after each step.
    """

    def __init__(
        self,
        trainer: Trainer,
        thread: StageThread,
        *,
        profile: ProfileWindow,
        order: contextlib.AbstractContextManager,
        critic: StreamedTexts | None = None,
    ) -> None:
        self._trainer = trainer
        self._critic = critic
        self._thread = thread
        self._profile = profile
        self._order = order

    @property
    def version(self) -> int:
        return self._trainer.version

    async def train(self, batch: PackedBatch) -> Mapping[str, float]:
        return await self._thread.run(self._train, batch)

    def _train(self, batch: PackedBatch) -> Mapping[str, float]:
        step = self._trainer.version + 1
        self._profile.before_step(step)
        start = time.monotonic()
        with span("train_step", step=step):
            with self._order:
                output = self._trainer.train(batch)
            metrics = output.fetch()
        if self._critic is not None:
            self._critic.replace_params(self._trainer.critic_params)
        seconds = time.monotonic() - start
        self._profile.after_step(step)
        num_tokens = int(np.count_nonzero(np.asarray(batch.segment_ids)))
        return {
            **metrics,
            "trainer/busy_seconds": seconds,
            "trainer/tokens_per_second": num_tokens / seconds,
        }


class DevicePublication:
    """`PublicationStage` between two meshes of this process."""

    def __init__(
        self,
        channel: DeviceChannel,
        store: WeightStore,
        *,
        trainer: Trainer,
        order: contextlib.AbstractContextManager,
    ) -> None:
        self._channel = channel
        self._store = store
        self._trainer = trainer
        self._order = order
        self._published_version = -1

    def publish(self, version: int) -> None:
        if version == self._published_version:
            return  # sent already: at the start of a run it is asked for twice
        with span("publish"), self._order:
            self._channel.publish(version, without_value_head(self._trainer.state.params))
        self._published_version = version

    def latest(self) -> PublishedWeights:
        with span("weight_swap"):
            return self._store.latest()

    async def wait_for(self, version: int) -> None:
        await asyncio.wrap_future(self._store.arrival(version))

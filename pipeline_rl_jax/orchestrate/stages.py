"""The stages a schedule drives: protocols and what passes between them and the loops.

Owns no behaviour. `orchestrate/build.py` makes the real ones, the tests and the simulation make
others. Everything that takes time is awaited; a stage that works on a device does so in a thread of
its own (`orchestrate/threads.py`), so that awaiting it never blocks the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline_rl_jax.records import Chunk, Completion, Group, PackedBatch, Prompt, Rollout
from pipeline_rl_jax.rewards.score import ScoringFailure


class Weights(Protocol):
    """A complete set of weights on the generation side."""

    @property
    def version(self) -> int:
        """Optimizer steps applied."""
        ...


class PromptSource(Protocol):
    """Where prompts come from; `rollouts.ledger.PromptLedger` is one."""

    def next(self) -> Prompt | None:
        """The next prompt, or None at the end of the data."""
        ...

    def finish(self, prompt_id: int) -> None:
        """The prompt has been trained on or dropped."""
        ...


class GenerationStage(Protocol):
    """The decode loop with its slots."""

    @property
    def num_open_samples(self) -> int:
        """Slots that no admitted sample has or waits for; 0 when more are admitted than fit."""
        ...

    @property
    def num_live(self) -> int:
        """Samples admitted and unfinished, in a slot or waiting for one."""
        ...

    def admit(self, prompt: Prompt, group_size: int) -> None:
        """Takes in samples 0 .. group_size - 1 of a prompt; more than there are slots wait."""
        ...

    async def advance(self, weights: Weights) -> Sequence[Completion]:
        """Prefills what fits, decodes one chunk with these weights, returns what finished.

        Only called while a sample is live. Each sample admitted comes back exactly once; one that
        is given up on comes back with `StopReason.CANCELLED`.
        """
        ...

    def take_chunks(self) -> Sequence[Chunk]:
        """What was written since the last call, in order; nothing when nobody reads it."""
        ...

    def cancel_all(self) -> None:
        """Frees every slot and forgets every sample; none of them comes back."""
        ...


class ScoringStage(Protocol):
    """Rewards, off the decode path. Called for several completions at once."""

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Begins to read what is being written; returns at once.

        Each completion's chunks come in order and before it is scored or forgotten.
        """
        ...

    async def score(self, completion: Completion) -> Rollout | ScoringFailure:
        """The rollout, or why there is none: it is then dropped and counted, not trained on."""
        ...

    def forget(self, completion: Completion) -> None:
        """A completion that will not be scored: what was kept of it is given up."""
        ...

    def forget_all(self) -> None:
        """Nothing that is still being written or scored will be needed."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PreparedBatch:
    """What the preprocessor made of the groups of one optimizer step."""

    batch: PackedBatch | None  # None when nothing was left to train on: other groups are fetched
    dropped: Mapping[str, int]  # rollouts left out, by reason
    metrics: Mapping[str, float]


class PreprocessStage(Protocol):
    """Groups to batches: reference logprobs, advantages, packing."""

    def refuse(self, group: Group) -> str | None:
        """Why a finished group is not worth its place in a batch, or None to keep it.

        A refused group is dropped and counted and another prompt is admitted in its place. The
        stage must stop refusing after a number of groups per batch of its own choice, so that data
        without a single useful group cannot stall the run.
        """
        ...

    async def assemble(self, groups: Sequence[Group], version: int) -> PreparedBatch:
        """The batch of the optimizer step that weights `version` take, from all its groups."""
        ...


class TrainingStage(Protocol):
    """The optimizer."""

    @property
    def version(self) -> int:
        """Optimizer steps applied to the current parameters."""
        ...

    async def train(self, batch: PackedBatch) -> Mapping[str, float]:
        """One optimizer step: `version` grows by one. Returns the metrics it has by now."""
        ...


class PublicationStage(Protocol):
    """Moves parameters from the trainer to the decode loop."""

    def publish(self, version: int) -> None:
        """Starts to move the trainer's current parameters, which have this version."""
        ...

    def latest(self) -> Weights:
        """The newest complete weights. Only called once a version has been waited for."""
        ...

    async def wait_for(self, version: int) -> None:
        """Returns once `latest` has this version or a newer one."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """What an observer learns of an optimizer step."""

    version: int  # weight version after the step
    groups: Sequence[Group]  # what it trained on, in order of admission
    metrics: Mapping[str, float]  # the preprocessor's and the trainer's
    masked_tokens: int  # taken out of the loss by schedule.beyond_max_lag = "mask"
    waited_seconds: Mapping[tuple[str, str], float]  # (who, for whom), since the report before
    dropped: Mapping[str, int]  # rollouts by reason, since the start
    groups_waiting: int  # finished and not yet in a batch
    groups_out: int  # admitted and not yet in a batch: waiting, being scored or being generated


class Observer(Protocol):
    """Telemetry, checkpoints, evaluation: all that looks at a run and does not drive it."""

    async def after_step(self, report: StepReport) -> None:
        """The trainer waits for it; generation does not, in schedules where it need not."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """Everything a schedule needs to run."""

    prompts: PromptSource
    generation: GenerationStage
    scoring: ScoringStage
    preprocess: PreprocessStage
    training: TrainingStage
    publication: PublicationStage
    observer: Observer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """How a run ended. admitted = trained + dropped, in rollouts."""

    version: int
    ended: str  # num_steps | data | stopped
    admitted_rollouts: int
    trained_rollouts: int
    dropped: Mapping[str, int]  # rollouts by reason
    waited_seconds: Mapping[tuple[str, str], float]  # (who, for whom)

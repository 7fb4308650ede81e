"""Deterministic stages for schedules: every token depends on what it must depend on, and no more.

A token is a function of (seed, prompt, sample, position, weights); weights are a digest of all that
they were trained on. So equal tokens mean equal weights at every step before. Times are virtual.
"""

import asyncio
import collections
import dataclasses
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from pipeline_rl_jax.orchestrate import conventional, one_step_off, oppo, pipeline
from pipeline_rl_jax.orchestrate.flow import Plan
from pipeline_rl_jax.orchestrate.stages import PreparedBatch, RunReport, Stages, StepReport
from pipeline_rl_jax.records import (
    Chunk,
    Completion,
    Group,
    PackedBatch,
    Prompt,
    Rollout,
    StopReason,
)
from pipeline_rl_jax.rewards.score import ScoringFailure
from pipeline_rl_jax.rollouts.ledger import PromptLedger
from pipeline_rl_jax.settings import OvercommitSettings
from tests.fakes.virtual_clock import run_virtual

SCHEDULES = {
    "conventional": conventional,
    "one_step_off": one_step_off,
    "pipeline": pipeline,
    "oppo": oppo,
}


def unit(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts only."""
    return zlib.crc32(repr(parts).encode()) / 2**32


class NumberedPrompts:
    """A `PromptStream` of prompts 0, 1, 2, …; `count` None is without end."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self._next = 0

    def __next__(self) -> Prompt:
        if self._count is not None and self._next >= self._count:
            raise StopIteration
        self._next += 1
        return Prompt(
            prompt_id=self._next - 1, token_ids=np.zeros(1, np.int32), text="?", answer="!"
        )

    def get_state(self) -> dict[str, int]:
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        self._next = state["next"]


@dataclasses.dataclass(frozen=True)
class FakeWeights:
    version: int
    digest: int


@dataclasses.dataclass
class _Sample:
    prompt: Prompt
    index: int
    length: int
    tokens: list[int]
    versions: list[int]


class FakeGeneration:
    """Slots, a queue in front of them, and one chunk at a time."""

    def __init__(
        self,
        *,
        slots: int = 4,
        tokens_per_chunk: int = 2,
        seconds: Callable[[int], float] = lambda chunk: 1.0,
        length: Callable[[int, int], int] = lambda prompt_id, sample: 4,
        seed: int = 0,
    ) -> None:
        self.slots = slots
        self.tokens_per_chunk = tokens_per_chunk
        self.seconds = seconds
        self.length = length
        self.seed = seed
        self.num_chunks = 0
        self.max_waiting = 0
        self._queue: collections.deque[_Sample] = collections.deque()
        self._slots: list[_Sample] = []
        self._chunks: list[Chunk] = []

    @property
    def num_live(self) -> int:
        return len(self._slots) + len(self._queue)

    @property
    def num_open_samples(self) -> int:
        return max(0, self.slots - self.num_live)

    def admit(self, prompt: Prompt, group_size: int) -> None:
        for index in range(group_size):
            length = self.length(prompt.prompt_id, index)
            self._queue.append(_Sample(prompt, index, length, [], []))

    async def advance(self, weights: FakeWeights) -> Sequence[Completion]:
        assert self.num_live, "advance without a live sample"
        while self._queue and len(self._slots) < self.slots:
            self._slots.append(self._queue.popleft())
        self.max_waiting = max(self.max_waiting, len(self._queue))
        starts = [len(sample.tokens) for sample in self._slots]
        for _ in range(self.tokens_per_chunk):
            for sample in self._slots:
                if len(sample.tokens) < sample.length:
                    sample.tokens.append(self._token(sample, weights))
                    sample.versions.append(weights.version)
        self._chunks += [
            self._chunk(sample, start, weights.version)
            for sample, start in zip(self._slots, starts, strict=True)
        ]
        await asyncio.sleep(self.seconds(self.num_chunks))
        self.num_chunks += 1
        done = [sample for sample in self._slots if len(sample.tokens) >= sample.length]
        self._slots = [sample for sample in self._slots if len(sample.tokens) < sample.length]
        return [self._complete(sample) for sample in done]

    def take_chunks(self) -> Sequence[Chunk]:
        chunks, self._chunks = self._chunks, []
        return chunks

    def cancel_all(self) -> None:
        self._slots.clear()
        self._queue.clear()

    def _token(self, sample: _Sample, weights: FakeWeights) -> int:
        position = len(sample.tokens)
        key = (self.seed, sample.prompt.prompt_id, sample.index, position, weights.digest)
        return int(unit(*key) * 1000)

    def _chunk(self, sample: _Sample, start: int, version: int) -> Chunk:
        ended = len(sample.tokens) >= sample.length
        return Chunk(
            prompt=sample.prompt,
            sample_index=sample.index,
            start=start,
            token_ids=np.asarray(sample.tokens[start:], np.int32),
            logprobs=np.zeros(len(sample.tokens) - start, np.float32),
            weight_version=version,
            stop_reason=StopReason.EOS if ended else None,
        )

    def _complete(self, sample: _Sample) -> Completion:
        return Completion(
            prompt=sample.prompt,
            sample_index=sample.index,
            token_ids=np.asarray(sample.tokens, np.int32),
            logprobs=np.zeros(len(sample.tokens), np.float32),
            weight_versions=np.asarray(sample.versions, np.int32),
            stop_reason=StopReason.EOS,
        )


class FakeScoring:
    """The reward is a function of the tokens; `fails` names completions that get none.

    `reading` holds the tokens of all that is being read: every completion that is scored must have
    been read to its last token.
    """

    def __init__(
        self,
        *,
        seconds: Callable[[Completion], float] = lambda completion: 0.5,
        fails: Callable[[Completion], bool] = lambda completion: False,
    ) -> None:
        self.seconds = seconds
        self.fails = fails
        self.num_at_once = 0
        self.max_at_once = 0
        self.reading: dict[tuple[int, int], list[int]] = {}
        self.num_forgotten = 0

    def read(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            key = (chunk.prompt.prompt_id, chunk.sample_index)
            known = self.reading.setdefault(key, [])
            assert chunk.start == len(known), "chunks in order, each once"
            known += chunk.token_ids.tolist()

    def forget(self, completion: Completion) -> None:
        del self.reading[completion.prompt.prompt_id, completion.sample_index]
        self.num_forgotten += 1

    def forget_all(self) -> None:
        self.reading.clear()

    async def score(self, completion: Completion) -> Rollout | ScoringFailure:
        read = self.reading.pop((completion.prompt.prompt_id, completion.sample_index))
        assert read == completion.token_ids.tolist(), "read to the end before it is scored"
        self.num_at_once += 1
        self.max_at_once = max(self.max_at_once, self.num_at_once)
        await asyncio.sleep(self.seconds(completion))
        self.num_at_once -= 1
        if self.fails(completion):
            return ScoringFailure(reason="no_score")
        return Rollout(completion=completion, reward=float(completion.token_ids.sum() % 2))


class FakePreprocess:
    """One row a rollout. Refuses groups by a function of them, at most `max_refused` a batch."""

    def __init__(
        self,
        *,
        seconds: float = 0.25,
        refuses: Callable[[Group], bool] = lambda group: False,
        max_refused: int = 3,
        empty: Callable[[int, Sequence[Group]], bool] = lambda version, groups: False,
    ) -> None:
        self.seconds = seconds
        self.refuses = refuses
        self.max_refused = max_refused
        self.empty = empty
        self._num_refused = 0

    def refuse(self, group: Group) -> str | None:
        if self._num_refused >= self.max_refused or not self.refuses(group):
            return None
        self._num_refused += 1
        return "refused"

    async def assemble(self, groups: Sequence[Group], version: int) -> PreparedBatch:
        await asyncio.sleep(self.seconds)
        self._num_refused = 0
        if self.empty(version, groups):
            return PreparedBatch(batch=None, dropped={}, metrics={})
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return PreparedBatch(batch=rows(rollouts), dropped={}, metrics={"rows": len(rollouts)})


def rows(rollouts: Sequence[Rollout]) -> PackedBatch:
    """A batch of completions, one a row, without their prompts."""
    width = max(rollout.completion.num_tokens for rollout in rollouts)
    shape = (len(rollouts), width)
    token_ids, versions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    for row, rollout in enumerate(rollouts):
        completion = rollout.completion
        token_ids[row, : completion.num_tokens] = completion.token_ids
        versions[row, : completion.num_tokens] = completion.weight_versions
    zeros = np.zeros(shape, np.float32)
    return PackedBatch(
        token_ids=token_ids,
        segment_ids=(versions >= 0).astype(np.int32),
        positions=np.broadcast_to(np.arange(width, dtype=np.int32), shape),
        loss_mask=versions >= 0,
        sequence_index=np.where(versions >= 0, np.arange(len(rollouts))[:, None], -1),
        behaviour_logprobs=zeros,
        advantages=zeros,
        returns=zeros,
        reference_logprobs=zeros,
        weight_versions=versions,
        num_sequences=np.int32(len(rollouts)),
        num_rows=np.int32(len(rollouts)),
    )


class FakeTraining:
    """Weights are a digest of every batch so far, in order."""

    def __init__(
        self, *, seconds: Callable[[int], float] = lambda version: 2.0, version: int = 0
    ) -> None:
        self.seconds = seconds
        self.version = version
        self.digest = 0
        self.batches: list[PackedBatch] = []
        self.lags: list[int] = []  # the largest of each batch

    async def train(self, batch: PackedBatch) -> dict[str, float]:
        await asyncio.sleep(self.seconds(self.version))
        for array in (batch.token_ids, batch.loss_mask):
            self.digest = zlib.crc32(np.ascontiguousarray(array).tobytes(), self.digest)
        versions = batch.weight_versions[batch.loss_mask]
        self.lags.append(int(self.version - versions.min()) if versions.size else 0)
        self.batches.append(batch)
        self.version += 1
        return {"lag/max_steps": self.lags[-1]}


class FakePublication:
    """Weights arrive some time after they were sent."""

    def __init__(self, training: FakeTraining, *, seconds: float = 0.1) -> None:
        self._training = training
        self.seconds = seconds
        self.sent: list[int] = []
        self._latest = FakeWeights(-1, 0)

    def publish(self, version: int) -> None:
        assert version == self._training.version
        weights = FakeWeights(version, self._training.digest)
        self.sent.append(version)
        asyncio.get_running_loop().call_later(self.seconds, self._arrive, weights)

    def latest(self) -> FakeWeights:
        return self._latest

    async def wait_for(self, version: int) -> None:
        while self._latest.version < version:
            await asyncio.sleep(self.seconds / 4 + 1e-3)

    def _arrive(self, weights: FakeWeights) -> None:
        self._latest = weights


class FakeObserver:
    def __init__(
        self, *, seconds: float = 0.0, at_step: Callable[[StepReport], None] = lambda report: None
    ) -> None:
        self.seconds = seconds
        self.at_step = at_step
        self.reports: list[StepReport] = []

    async def after_step(self, report: StepReport) -> None:
        await asyncio.sleep(self.seconds)
        self.reports.append(report)
        self.at_step(report)

    @property
    def trained_prompts(self) -> list[list[int]]:
        """Prompt ids of every batch, in order."""
        return [[group.prompt.prompt_id for group in report.groups] for report in self.reports]


@dataclasses.dataclass(kw_only=True)
class World:
    """Fakes that belong together; each may be replaced before `stages` is read."""

    generation: FakeGeneration = dataclasses.field(default_factory=FakeGeneration)
    scoring: FakeScoring = dataclasses.field(default_factory=FakeScoring)
    preprocess: FakePreprocess = dataclasses.field(default_factory=FakePreprocess)
    training: FakeTraining = dataclasses.field(default_factory=FakeTraining)
    observer: FakeObserver = dataclasses.field(default_factory=FakeObserver)
    publication: FakePublication | None = None
    publication_seconds: float = 0.1
    prompts: PromptLedger | None = None
    num_prompts: int | None = None

    @property
    def stages(self) -> Stages:
        if self.publication is None:
            self.publication = FakePublication(self.training, seconds=self.publication_seconds)
        if self.prompts is None:
            self.prompts = PromptLedger(NumberedPrompts(self.num_prompts))
        return Stages(
            prompts=self.prompts,
            generation=self.generation,
            scoring=self.scoring,
            preprocess=self.preprocess,
            training=self.training,
            publication=self.publication,
            observer=self.observer,
        )


def make_plan(**changes: object) -> Plan:
    defaults = {
        "seed": 7,
        "num_steps": 6,
        "batch_groups": 2,
        "group_size": 2,
        "max_lag": 2,
        "beyond_max_lag": "wait",
        "stream_groups": changes.get("batch_groups", 2),
        "publish_every_steps": 1,
        "steps_per_round": 1,
        "overlap": True,
        "overcommit": make_overcommit(),
        "scores_in_flight": 8,
        "deadline_seconds": 1000.0,
    }
    return Plan(**{**defaults, **changes})


def make_overcommit(**changes: object) -> OvercommitSettings:
    """Δ = 2, put off at most twice."""
    defaults = {
        "variant": "fixed",
        "start_groups": 2,
        "min_groups": 0,
        "max_groups": 8,
        "change_groups": 1,
        "window_steps": 2,
        "max_deferrals": 2,
    }
    return OvercommitSettings(**{**defaults, **changes})


def long_tailed(prompt_id: int, sample: int) -> int:
    """Lengths from 1 to 40 tokens, most of them short."""
    return 1 + int(40 * unit("length", prompt_id, sample) ** 4)


def run_schedule(
    name: str, world: World, plan: Plan, *, stop_after_seconds: float | None = None
) -> tuple[RunReport, float]:
    """The report of a run, and the virtual seconds it took."""

    async def main() -> tuple[RunReport, float]:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        if stop_after_seconds is not None:
            loop.call_later(stop_after_seconds, stop.set)
        report = await SCHEDULES[name].run(world.stages, plan, stop=stop)
        return report, loop.time()

    return run_virtual(main())

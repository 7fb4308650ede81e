"""Continuous batching: samples in, completions out, over an engine's fixed set of slots.

Owns the slot table on the host: which sample is in which slot and what it has written, with the
weight version of every token. The device is asked once per chunk. Knows nothing of schedules: with
which weights a chunk is decoded is the caller's to say, call by call.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pipeline_rl_jax.algorithms.packing import padded_size
from pipeline_rl_jax.data.tokenizer import Tokenizer
from pipeline_rl_jax.generation.engine import DecodeState, Engine, ResultTokens, SlotRequest
from pipeline_rl_jax.generation.stopping import StopRules, StopStringWatcher
from pipeline_rl_jax.records import Chunk, Completion, Prompt, StopReason
from pipeline_rl_jax.settings import GenerationSettings
from pipeline_rl_jax.telemetry.spans import span


class VersionedParams(Protocol):
    """Engine-layout weights and the number of optimizer steps behind them."""

    @property
    def version(self) -> int: ...

    @property
    def params(self) -> Any: ...


@dataclasses.dataclass(kw_only=True)
class _Sample:
    """One completion in the making."""

    prompt: Prompt
    sample_index: int
    max_new_tokens: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    watcher: StopStringWatcher | None = None
    started_seconds: float = 0.0

    @property
    def length(self) -> int:
        return self.prompt.token_ids.size + len(self.token_ids)

    def known_tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt.token_ids, np.asarray(self.token_ids, np.int32)])


@dataclasses.dataclass(kw_only=True)
class BatcherCounts:
    """Totals since the start, for telemetry."""

    decoded_tokens: int = 0
    busy_seconds: float = 0.0  # in `advance`: prefill, decoding, taking results in
    prefilled_tokens: int = 0
    chunks: int = 0
    decode_steps: int = 0
    slot_steps: int = 0  # decode steps times slots: what decoded_tokens could have been
    version_changes: int = 0  # chunks decoded with other weights than the chunk before
    inflight_updates: int = 0  # of those, with at least one sample half written


class ContinuousBatcher:
    """Keeps the slots of an engine full.

    Args:
      engine: shared by any number of batchers; the decode state is this batcher's own.
      settings: the `generation` section; an evaluation hands in a copy with temperature 0.
      tokenizer: for the text of completions.
      stop_rules: must be those the engine was built with.
      max_positions: context limit of the model.
      emit_chunks: keep what every sample wrote, chunk by chunk, for `take_chunks`.
    """

    def __init__(
        self,
        engine: Engine,
        settings: GenerationSettings,
        *,
        tokenizer: Tokenizer,
        stop_rules: StopRules,
        max_positions: int,
        emit_chunks: bool = False,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._tokenizer = tokenizer
        self._stop_rules = stop_rules
        self._context = min(settings.max_prompt_tokens + settings.max_new_tokens, max_positions)
        self._state: DecodeState = engine.init_decode_state()
        self._cache_tokens = settings.min_cache_tokens
        self._pending: collections.deque[_Sample] = collections.deque()
        self._slots: list[_Sample | None] = [None] * engine.max_concurrent_decodes
        self._slot_sizes = _slot_sizes(
            engine.max_concurrent_decodes, settings.min_slots, parts=engine.mesh.shape["data"]
        )
        self._last_version: int | None = None
        self.chunk_tokens = settings.tokens_per_chunk  # K of the next chunk; may be set
        self._chunks: list[Chunk] | None = [] if emit_chunks else None
        self.counts = BatcherCounts()

    @property
    def num_open_samples(self) -> int:
        """Slots that no admitted sample has or waits for."""
        return max(0, self._engine.max_concurrent_decodes - self.num_live)

    @property
    def num_live(self) -> int:
        """Samples admitted and unfinished, in a slot or waiting for one."""
        return len(self._slots) - self._slots.count(None) + len(self._pending)

    @property
    def oldest_version(self) -> int | None:
        """Lowest weight version among the tokens of unfinished samples."""
        versions = [s.weight_versions[0] for s in self._slots if s and s.weight_versions]
        return min(versions, default=None)

    def admit(self, prompt: Prompt, group_size: int) -> None:
        """Takes in samples 0 .. group_size - 1 of a prompt. ValueError when it is too long."""
        size = prompt.token_ids.size
        if not 0 < size <= self._settings.max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.prompt_id} has {size} tokens, generation.max_prompt_tokens is "
                f"{self._settings.max_prompt_tokens}; raise it or set data.too_long=drop"
            )
        if size >= self._context:
            raise ValueError(
                f"prompt {prompt.prompt_id} has {size} tokens and leaves no room in the model's "
                f"context of {self._context}; lower generation.max_prompt_tokens"
            )
        limit = min(self._settings.max_new_tokens, self._context - size)
        for index in range(group_size):
            self._pending.append(_Sample(prompt=prompt, sample_index=index, max_new_tokens=limit))

    def advance(self, weights: VersionedParams) -> list[Completion]:
        """Fills free slots, decodes one chunk with these weights, returns what finished.

        Blocks until the chunk is on the host.
        """
        start = time.monotonic()
        finished = self._advance(weights)
        self.counts.busy_seconds += time.monotonic() - start
        return finished

    def _advance(self, weights: VersionedParams) -> list[Completion]:
        if self._count_update(weights.version) and self._settings.kv_policy == "recompute":
            self.recompute(weights)
        self._fit_slots()
        self._fill_slots(weights.params)
        if not any(self._slots):
            return []
        self._reserve_cache()
        with span("decode_chunk"):
            self._state, result = self._engine.generate(
                weights.params, self._state, max_steps=self.chunk_tokens
            )
            result = result.fetch()
        return self._harvest(result, weights.version)

    def take_chunks(self) -> list[Chunk]:
        """What was written since the last call, in order; the last of a sample names its end."""
        if self._chunks is None:
            return []
        chunks, self._chunks = self._chunks, []
        return chunks

    def cancel_all(self) -> list[Completion]:
        """Frees every slot and forgets every sample; returns them as far as they got."""
        cancelled = [self._complete(s, StopReason.CANCELLED) for s in self._slots if s]
        cancelled += [self._complete(s, StopReason.CANCELLED) for s in self._pending]
        for slot, sample in enumerate(self._slots):
            if sample is not None:
                self._state = self._engine.free_resource(self._state, slot)
                self._slots[slot] = None
        self._pending.clear()
        return cancelled

    def recompute(self, weights: VersionedParams) -> None:
        """Rebuilds the keys and values of every live sample with these weights.

        Tokens, randomness and positions are untouched: each sample continues where it was.
        """
        live = [slot for slot, sample in enumerate(self._slots) if sample is not None]
        self._insert(live, weights.params)

    def _count_update(self, version: int) -> bool:
        """True when these weights are new to at least one half-written sample."""
        changed = self._last_version not in (None, version)
        in_flight = changed and any(s is not None and s.token_ids for s in self._slots)
        self.counts.version_changes += int(changed)
        self.counts.inflight_updates += int(in_flight)
        self._last_version = version
        return in_flight

    def _fit_slots(self) -> None:
        """As a batch drains, decoding goes on in half as many slots; new samples widen it again."""
        size = next((n for n in self._slot_sizes if n >= self.num_live), self._slot_sizes[-1])
        if size == len(self._slots) or not self.num_live:
            return
        live = [slot for slot, sample in enumerate(self._slots) if sample is not None]
        taken = live + [-1] * (size - len(live))
        self._state = self._engine.take_slots(self._state, np.asarray(taken, np.int32))
        self._slots = [self._slots[slot] if slot >= 0 else None for slot in taken]

    def _fill_slots(self, params: Any) -> None:
        filled = []
        for slot, sample in enumerate(self._slots):
            if sample is None and self._pending:
                new = self._pending.popleft()
                new.started_seconds = time.monotonic()
                new.watcher = self._stop_rules.watcher()
                self._slots[slot] = new
                filled.append(slot)
        self._insert(filled, params)

    def _insert(self, slots: Sequence[int], params: Any) -> None:
        """Prefills what these slots hold, each distinct sequence once, and inserts it."""
        by_sequence: dict[tuple[int, int], list[int]] = {}
        for slot in slots:
            sample = self._slot(slot)
            # Samples of a prompt share its prefill until they have written something of their own.
            own = sample.sample_index if sample.token_ids else -1
            by_sequence.setdefault((sample.prompt.prompt_id, own), []).append(slot)
        for bucket, groups in self._by_bucket(list(by_sequence.values())).items():
            rows = self._settings.prompts_per_prefill
            for start in range(0, len(groups), rows):
                self._prefill_and_insert(groups[start : start + rows], bucket, params)

    def _by_bucket(self, groups: list[list[int]]) -> dict[int, list[list[int]]]:
        buckets: dict[int, list[list[int]]] = {}
        for group in groups:
            length = self._slot(group[0]).length - 1
            buckets.setdefault(self._prefill_bucket(length), []).append(group)
        return buckets

    def _prefill_bucket(self, length: int) -> int:
        """Smallest bucket that holds `length` tokens; beyond the last, cache sizes serve."""
        for bucket in self._settings.prefill_buckets:
            if length <= bucket:
                return bucket
        return self._cache_bucket(length)

    def _prefill_and_insert(self, groups: list[list[int]], bucket: int, params: Any) -> None:
        rows = self._settings.prompts_per_prefill
        tokens = np.zeros((rows, bucket), np.int32)
        lengths = np.zeros(rows, np.int32)
        requests = []
        for row, group in enumerate(groups):
            known = self._slot(group[0]).known_tokens()
            lengths[row] = known.size - 1  # the last one is fed by the next decode step
            tokens[row, : known.size - 1] = known[:-1]
            requests += [self._request(slot, row) for slot in group]
        self.counts.prefilled_tokens += int(lengths.sum())
        self._grow_cache(int(lengths.max()))
        with span("prefill"):
            prefix = self._engine.prefill(params=params, padded_tokens=tokens, true_lengths=lengths)
        with span("insert"):
            self._state = self._engine.bulk_insert(prefix, self._state, requests)

    def _request(self, slot: int, row: int) -> SlotRequest:
        sample = self._slot(slot)
        return SlotRequest(
            slot=slot,
            row=row,
            last_token=int(
                sample.token_ids[-1] if sample.token_ids else sample.prompt.token_ids[-1]
            ),
            length=sample.length - 1,
            prompt_id=sample.prompt.prompt_id,
            sample_index=sample.sample_index,
            num_generated=len(sample.token_ids),
            max_new_tokens=sample.max_new_tokens,
            temperature=self._settings.temperature,
        )

    def _reserve_cache(self) -> None:
        """Room for the next chunk; a cache twice too large for all that is live is cut."""
        longest = max(s.length for s in self._slots if s)
        needed = min(longest + self.chunk_tokens, self._context)
        bucket = self._cache_bucket(needed)
        if bucket > self._cache_tokens or 2 * bucket < self._cache_tokens:
            self._resize(bucket)

    def _grow_cache(self, needed: int) -> None:
        if needed > self._cache_tokens:
            self._resize(self._cache_bucket(needed))

    def _resize(self, cache_tokens: int) -> None:
        self._state = self._engine.resize(self._state, cache_tokens=cache_tokens)
        self._cache_tokens = cache_tokens

    def _cache_bucket(self, needed: int) -> int:
        bucket = padded_size(needed, self._settings.min_cache_tokens)
        return min(bucket, max(needed, self._context))

    def _harvest(self, result: ResultTokens, version: int) -> list[Completion]:
        counts = np.asarray(result.counts)
        steps = int(counts.max())
        self.counts.chunks += 1
        self.counts.decode_steps += steps
        self.counts.slot_steps += steps * len(self._slots)
        finished = []
        for slot, sample in enumerate(self._slots):
            if sample is None:
                continue
            count = int(counts[slot])
            start = len(sample.token_ids)
            reason = self._take(sample, slot, count, result, version)
            self.counts.decoded_tokens += count
            if self._chunks is not None:
                self._chunks.append(_chunk(sample, start, version, reason))
            if reason is not None:
                self._slots[slot] = None
                finished.append(self._complete(sample, reason))
        return finished

    def _take(
        self, sample: _Sample, slot: int, count: int, result: ResultTokens, version: int
    ) -> StopReason | None:
        """Adds a chunk to a sample. Why it is over, or None."""
        tokens = np.asarray(result.token_ids)[slot, :count].tolist()
        cut = sample.watcher.extend(tokens) if sample.watcher else None
        kept = count if cut is None else cut
        sample.token_ids += tokens[:kept]
        sample.logprobs += np.asarray(result.logprobs)[slot, :kept].tolist()
        sample.weight_versions += [version] * kept
        if bool(np.asarray(result.stopped)[slot]) and kept == count:
            return self._stop_rules.reason(sample.token_ids[-1])
        if cut is not None:
            if len(sample.token_ids) < sample.max_new_tokens or kept < count:
                self._state = self._engine.free_resource(self._state, slot)
            return StopReason.STOP_STRING
        if len(sample.token_ids) < sample.max_new_tokens:
            return None
        at_context = sample.max_new_tokens < self._settings.max_new_tokens
        return StopReason.CONTEXT_LIMIT if at_context else StopReason.MAX_NEW_TOKENS

    def _complete(self, sample: _Sample, reason: StopReason) -> Completion:
        return Completion(
            prompt=sample.prompt,
            sample_index=sample.sample_index,
            token_ids=np.asarray(sample.token_ids, np.int32),
            logprobs=np.asarray(sample.logprobs, np.float32),
            weight_versions=np.asarray(sample.weight_versions, np.int32),
            stop_reason=reason,
            text=self._tokenizer.decode(sample.token_ids),
            started_seconds=sample.started_seconds,
            finished_seconds=time.monotonic(),
        )

    def _slot(self, slot: int) -> _Sample:
        sample = self._slots[slot]
        assert sample is not None
        return sample


def _chunk(sample: _Sample, start: int, version: int, reason: StopReason | None) -> Chunk:
    """What a sample wrote from `start` on."""
    return Chunk(
        prompt=sample.prompt,
        sample_index=sample.sample_index,
        start=start,
        token_ids=np.asarray(sample.token_ids[start:], np.int32),
        logprobs=np.asarray(sample.logprobs[start:], np.float32),
        weight_version=version,
        stop_reason=reason,
    )


def _slot_sizes(most: int, least: int, *, parts: int) -> list[int]:
    """Numbers of slots to decode in, ascending: halves of `most` that `parts` divide."""
    sizes = [most]
    while sizes[0] % (2 * parts) == 0 and sizes[0] // 2 >= least:
        sizes.insert(0, sizes[0] // 2)
    return sizes

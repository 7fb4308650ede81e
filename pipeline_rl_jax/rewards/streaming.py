"""Scores and token quantities of completions that are read while they are still being written.

Owns which completion is in which row, who waits for one, and what has been read of each (OPPO's
intra-step overlap): a model prefills chunk k − 1 while the actor decodes chunk k, and at the end
only the last chunk is left. The device side is `streamed_model.py`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline_rl_jax.records import Chunk, StopReason
from pipeline_rl_jax.rewards.score import Score
from pipeline_rl_jax.rewards.streamed_model import RowTokens, StreamedModel

Key = tuple[int, int]  # prompt_id, sample_index


@dataclasses.dataclass(kw_only=True)
class StreamCounts:
    """Totals since the start, for telemetry. Seconds per prefilled token: busy_seconds over
    `streamed_tokens + final_tokens`."""

    streamed_tokens: int = 0  # read while the completion was being written
    final_tokens: int = 0  # read after its end: what is left of the wait for a score
    computed_tokens: int = 0  # with padding
    device_calls: int = 0
    busy_seconds: float = 0.0  # in `extend` and `finish`, on the device and beside it
    finished: int = 0
    cancelled: int = 0
    waited: int = 0  # completions that found no free row when they came


@dataclasses.dataclass(kw_only=True, eq=False)
class _Text:
    """Prompt and completion of one sample, as far as they are known."""

    prompt_length: int
    token_ids: np.ndarray
    row: int | None = None
    num_read: int = 0
    ended: bool = False
    results: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def num_unread(self) -> int:
        return self.token_ids.size - self.num_read


class StreamedTexts:
    """Reads completions chunk by chunk; the last word on each is fetched with `finish`.

    More completions than rows wait their turn, first come first served, and are caught up with in
    one go. Every method may be called from any thread, one at a time gets in.

    Args:
      model: nobody else's; its readout says what `finish` gives.
      per_token: the readout has a number per token, not one for the text so far.
    """

    def __init__(self, model: StreamedModel, *, per_token: bool) -> None:
        self._model = model
        self._per_token = per_token
        self._texts: dict[Key, _Text] = {}
        self._waiting: collections.deque[_Text] = collections.deque()
        self._free = list(range(model.shape.rows))
        self._spare = model.shape.rows
        self._lock = threading.Lock()
        self._counts = StreamCounts()

    @property
    def counts(self) -> StreamCounts:
        """A copy."""
        with self._lock:
            return dataclasses.replace(self._counts)

    @property
    def num_live(self) -> int:
        """Completions begun and neither finished nor cancelled."""
        with self._lock:
            return len(self._texts)

    @property
    def live_keys(self) -> list[Key]:
        """Which completions they are."""
        with self._lock:
            return list(self._texts)

    def replace_params(self, params: Mapping[str, Any]) -> None:
        """Reads on with other weights; what has been read stays as it was read."""
        with self._lock:
            self._model.replace_params(params)

    def extend(self, chunks: Iterable[Chunk]) -> None:
        """Reads chunks, several of one completion in their order; the prompt comes with its first.

        A chunk that says the completion was cancelled frees its row. ValueError for a chunk that
        does not join on to what came before, and for a text longer than the rows hold.
        """
        with self._lock, self._busy():
            for chunk in chunks:
                self._take_in(chunk)
            self._give_rows()
            self._read([text for text in self._texts.values() if text.row is not None])

    def finish(self, key: Key) -> np.ndarray:
        """The readout of a whole completion, whose row is free then.

        A scalar, or one number for each of its tokens; unread tokens are read first.
        """
        return self.finish_all([key])[0]

    def finish_all(self, keys: Sequence[Key]) -> list[np.ndarray]:
        """As `finish`, for several at once, what is left of them read together."""
        with self._lock, self._busy():
            left = {key: self._text(key) for key in keys}
            for text in left.values():
                text.ended = True
            results: dict[Key, np.ndarray] = {}
            while left:
                # Rows that these give up are for those that have none yet, read together again.
                with_row = [key for key, text in left.items() if text.row is not None]
                self._read([left[key] for key in with_row])
                for key in with_row or [next(iter(left))]:
                    results[key] = self._result(left.pop(key))
                    self._forget(key)
                self._give_rows()
            self._counts.finished += len(keys)
            return [results[key] for key in keys]

    def cancel(self, key: Key) -> None:
        """Forgets a completion; nothing happens when it is not known."""
        with self._lock:
            if key in self._texts:
                self._forget(key)
                self._counts.cancelled += 1

    def _take_in(self, chunk: Chunk) -> None:
        key = (chunk.prompt.prompt_id, chunk.sample_index)
        if chunk.stop_reason is StopReason.CANCELLED:
            if key in self._texts:
                self._forget(key)
                self._counts.cancelled += 1
            return
        if chunk.start == 0 and key not in self._texts:
            prompt = np.asarray(chunk.prompt.token_ids, np.int32)
            text = _Text(prompt_length=prompt.size, token_ids=prompt)
            self._texts[key] = text
            self._waiting.append(text)
            self._counts.waited += len(self._waiting) > len(self._free)
        text = self._text(key)
        known = text.token_ids.size - text.prompt_length
        if chunk.start != known or text.ended:
            raise ValueError(
                f"completion {key}: a chunk starts at token {chunk.start}, but {known} tokens "
                f"{'and its end ' if text.ended else ''}are known; chunks must come in order, once"
            )
        text.token_ids = np.concatenate([text.token_ids, chunk.token_ids.astype(np.int32)])
        text.ended = chunk.stop_reason is not None
        if text.token_ids.size > self._model.shape.max_tokens:
            raise ValueError(
                f"completion {key} has {text.token_ids.size} tokens with its prompt, a row of "
                f"streamed scoring holds {self._model.shape.max_tokens}; lower "
                "generation.max_new_tokens"
            )

    def _give_rows(self) -> None:
        while self._waiting and self._free:
            self._waiting.popleft().row = self._free.pop()

    def _read(self, texts: Sequence[_Text]) -> None:
        """Reads all that is unread of texts that have a row."""
        held = [text.token_ids.size for text in self._texts.values() if text.row is not None]
        self._model.reserve(max(held, default=1))
        while unread := [text for text in texts if text.num_unread]:
            entries = [_next_tokens(text) for text in unread]
            read, computed = self._model.extend(entries)
            self._counts.device_calls += 1
            self._counts.computed_tokens += computed
            for text, (num_tokens, value) in zip(unread, read, strict=True):
                text.num_read += num_tokens
                if not self._per_token:
                    text.results.clear()
                text.results.append(value)
                if text.ended:
                    self._counts.final_tokens += num_tokens
                else:
                    self._counts.streamed_tokens += num_tokens

    def _result(self, text: _Text) -> np.ndarray:
        if text.row is None:  # it ended before it got one: the spare row is for that
            self._waiting.remove(text)
            text.row = self._spare
            self._read([text])
            text.row = None
        if not self._per_token:
            return text.results[0]
        return np.concatenate(text.results)[text.prompt_length :]

    def _forget(self, key: Key) -> None:
        text = self._texts.pop(key)
        if text.row is not None:
            self._free.append(text.row)
        elif text in self._waiting:
            self._waiting.remove(text)

    def _text(self, key: Key) -> _Text:
        if key not in self._texts:
            raise ValueError(
                f"completion {key} is not being read: its first chunk never came, or it was "
                "finished or cancelled"
            )
        return self._texts[key]

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._counts.busy_seconds += time.monotonic() - start


class IncrementalScorer:
    """The reward model's score of completions read while they were written.

    `extend` with every chunk, `finish` once per completion. Equal to the score of the whole text.
    Methods may be called from any thread; they wait for the device.
    """

    def __init__(self, model: StreamedModel) -> None:
        """`model` with the readout `score_so_far`."""
        self._texts = StreamedTexts(model, per_token=False)

    @property
    def counts(self) -> StreamCounts:
        return self._texts.counts

    @property
    def num_live(self) -> int:
        return self._texts.num_live

    def extend(self, chunks: Iterable[Chunk]) -> None:
        self._texts.extend(chunks)

    def finish(self, key: Key) -> Score:
        return self.finish_all([key])[0]

    def finish_all(self, keys: Sequence[Key]) -> list[Score]:
        return [Score(value=float(value)) for value in self._texts.finish_all(keys)]

    def cancel(self, key: Key) -> None:
        self._texts.cancel(key)


def _next_tokens(text: _Text) -> RowTokens:
    assert text.row is not None
    return RowTokens(
        row=text.row,
        token_ids=text.token_ids[text.num_read :],
        start=text.num_read,
        prompt_length=text.prompt_length,
    )

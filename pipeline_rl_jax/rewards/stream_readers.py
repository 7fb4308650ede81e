"""All models that read completions while they are written, each in a thread of its own.

Owns the threads and the order of what they are asked: chunks are handed over without waiting, and
the last word on a completion is awaited. What a model reads off is its readout's to say, which
text is in which row `streaming.py`'s.

    decode loop ── read(chunks) ──▶ queue ─▶ thread "reward_model": StreamedTexts
                                    queue ─▶ thread "reference":    StreamedTexts
    completion  ── finish ────────▶ behind its chunks; awaited, one readout per model
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeline_rl_jax.records import Chunk, Completion
from pipeline_rl_jax.rewards.streaming import Key, StreamCounts, StreamedTexts
from pipeline_rl_jax.telemetry.spans import span

REWARD_MODEL = "reward_model"  # the reader of scores
REFERENCE = "reference"  # the reader of the reference policy's logprobs
CRITIC = "critic"  # the reader of the critic's values

_CLOSE_SECONDS = 10.0  # a thread that the device does not let go of is left behind


class _Finish(NamedTuple):
    key: Key
    future: concurrent.futures.Future[np.ndarray]


class _Forget(NamedTuple):
    keys: Sequence[Key] | None  # None = everything


_Request = Sequence[Chunk] | _Finish | _Forget | None  # None = end


class TextReader:
    """One model and its thread. Methods may be called from any thread and do not wait for it.

    Whatever has been asked for while the thread was busy is done together. The first error stays:
    it is raised where a completion is awaited and by every later `read`.
    """

    def __init__(self, name: str, texts: StreamedTexts) -> None:
        self._texts = texts
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._look()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def counts(self) -> StreamCounts:
        """As of the last work done: to ask what is being done would mean to wait for the device."""
        return self._counts

    @property
    def num_live(self) -> int:
        """Completions begun, and neither finished nor forgotten, as of the same time."""
        return self._num_live

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Begins to read chunks, those of a completion in their order."""
        if self._error is not None:
            raise self._error
        self._requests.put(chunks)

    async def finish(self, key: Key) -> np.ndarray:
        """The readout of a whole completion, all of whose chunks have been handed over.

        Cancelled: the completion is forgotten.
        """
        future: concurrent.futures.Future[np.ndarray] = concurrent.futures.Future()
        self._requests.put(_Finish(key, future))
        return await asyncio.wrap_future(future)

    def forget(self, keys: Sequence[Key] | None = None) -> None:
        """These completions, or all that are live, will not be finished; unknown ones are none."""
        self._requests.put(_Forget(keys))

    async def close(self) -> None:
        """Ends the thread after what has been asked for. Safe to call twice."""
        self._requests.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_SECONDS)

    def _work(self) -> None:
        open_ = True
        while open_:
            requests = [self._requests.get()]
            with contextlib.suppress(queue.Empty):
                while requests[-1] is not None:
                    requests.append(self._requests.get_nowait())
            open_ = requests[-1] is not None
            self._serve([request for request in requests if request is not None])
            self._look()

    def _look(self) -> None:
        self._counts, self._num_live = self._texts.counts, self._texts.num_live

    def _serve(self, requests: Sequence[Sequence[Chunk] | _Finish | _Forget]) -> None:
        finishes = [request for request in requests if isinstance(request, _Finish)]
        try:
            if self._error is not None:
                raise self._error
            self._read_and_answer(requests, finishes)
        except BaseException as error:  # noqa: BLE001  # it is raised where it is awaited
            self._error = error
            for _, future in finishes:
                if future.running() or (
                    not future.done() and future.set_running_or_notify_cancel()
                ):
                    future.set_exception(error)

    def _read_and_answer(
        self,
        requests: Sequence[Sequence[Chunk] | _Finish | _Forget],
        finishes: Sequence[_Finish],
    ) -> None:
        """All chunks first: those of whoever is to be finished or forgotten came before that."""
        chunks, forgotten = [], []
        for request in requests:
            if isinstance(request, _Forget):
                # "Everything" is what came before it, so also chunks that are yet to be read.
                live = [*self._texts.live_keys, *map(_key, chunks)]
                forgotten += live if request.keys is None else request.keys
            elif not isinstance(request, _Finish):
                chunks += request
        wanted = [f for f in finishes if f.future.set_running_or_notify_cancel()]
        forgotten += [f.key for f in finishes if f not in wanted]
        if chunks or wanted:
            with span("score_chunk"):
                if chunks:
                    self._texts.extend(chunks)
                values = self._texts.finish_all([f.key for f in wanted])
            self._look()
            for request, value in zip(wanted, values, strict=True):
                request.future.set_result(value)
        for key in forgotten:
            self._texts.cancel(key)


class StreamReaders:
    """The streamed models of a run by name. Without any, nothing happens.

    A model whose weights change is one more of them: what it has read of a completion was read
    with the weights of that time.
    """

    def __init__(self, readers: Mapping[str, StreamedTexts]) -> None:
        self._readers = {name: TextReader(name, texts) for name, texts in readers.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._readers)

    @property
    def counts(self) -> dict[str, StreamCounts]:
        """Totals since the start, by name."""
        return {name: reader.counts for name, reader in self._readers.items()}

    @property
    def num_live(self) -> int:
        """Completions that hold or wait for a row, over all models."""
        return sum(reader.num_live for reader in self._readers.values())

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Every model begins to read these chunks. Raises the error that one has met before."""
        for reader in self._readers.values():
            if chunks:
                reader.read(chunks)

    async def finish(self, completion: Completion) -> dict[str, np.ndarray]:
        """The readout of each model, by its name; waits only for what is left to read."""
        key = _key(completion)
        values = await asyncio.gather(*(reader.finish(key) for reader in self._readers.values()))
        return dict(zip(self._readers, values, strict=True))

    async def read_whole(self, name: str, completion: Completion, key: Key) -> np.ndarray:
        """One model's readout of a completion that was never streamed, read under a `key` that
        no streamed one has."""
        prompt = dataclasses.replace(completion.prompt, prompt_id=key[0])
        chunk = Chunk(
            prompt=prompt,
            sample_index=key[1],
            start=0,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            weight_version=-1,
            stop_reason=completion.stop_reason,
        )
        reader = self._readers[name]
        reader.read([chunk])
        return await reader.finish(key)

    def forget(self, completion: Completion) -> None:
        """A completion that will never be finished gives its rows up."""
        for reader in self._readers.values():
            reader.forget([_key(completion)])

    def forget_all(self) -> None:
        """Nothing that is being read will be finished."""
        for reader in self._readers.values():
            reader.forget()

    async def close(self) -> None:
        """Ends the threads. Safe to call twice."""
        await asyncio.gather(*(reader.close() for reader in self._readers.values()))


def _key(text: Chunk | Completion) -> Key:
    return text.prompt.prompt_id, text.sample_index

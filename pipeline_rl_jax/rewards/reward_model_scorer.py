"""Whole completions scored by a reward model, as one component of the reward.

Owns the batching: completions that ask at about the same time are scored in one device call, in a
thread of the scorer's own. Streamed scoring is `streaming.py`; both give the same scores.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from pipeline_rl_jax.algorithms.packing import padded_size
from pipeline_rl_jax.meshes import replicated
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.held_params import HeldParams
from pipeline_rl_jax.models.reward_model import build_reward_model
from pipeline_rl_jax.records import Completion
from pipeline_rl_jax.rewards.score import Score
from pipeline_rl_jax.rewards.streaming import StreamCounts
from pipeline_rl_jax.telemetry.spans import span

TokensOf = Callable[[Completion], np.ndarray]  # `data/vocabulary.py`: own_tokens, encode_again
_SHORTEST_TOKENS = 32
_ROWS_SHARE = 4
_CLOSE_SECONDS = 10.0  # a thread that the device does not let go of is left behind


class RewardModelOnDevice:
    """Scores of up to `rows` whole texts, padded to few shapes; not thread-safe.

    `params` as of `hf_reward.py`, on `mesh`, `offloaded` between two calls to the host; `order` is
    held while a program is dispatched.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Any],
        *,
        mesh: Mesh,
        rows: int,
        compute_dtype: str = "bfloat16",
        order: contextlib.AbstractContextManager | None = None,
        offloaded: bool = False,
    ) -> None:
        self.rows = rows
        self.max_tokens = config.max_positions
        self._params = HeldParams(params, offloaded=offloaded)
        self._order = order or contextlib.nullcontext()
        self._host_arrays = replicated(mesh)
        graph = build_reward_model(config, compute_dtype=compute_dtype)

        def score(params: Mapping[str, Any], token_ids: jax.Array, lengths: jax.Array):
            return nnx.merge(graph, params).sequence_scores(token_ids, lengths)

        self._score = jax.jit(score, out_shardings=self._host_arrays)

    def scores(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """One float32 score for each of up to `rows` texts; waits for the result."""
        rows = self._num_rows(len(texts))
        lengths = np.zeros(rows, np.int32)
        lengths[: len(texts)] = [text.size for text in texts]
        width = padded_size(int(lengths.max()), _SHORTEST_TOKENS)
        token_ids = np.zeros((rows, width), np.int32)
        for row, text in zip(token_ids, texts, strict=False):
            row[: text.size] = text
        arrays = jax.device_put((token_ids, lengths), self._host_arrays)
        with self._params.on_devices() as params:
            with self._order:
                result = self._score(params, *arrays)
            return np.asarray(jax.device_get(result))[: len(texts)]

    def _num_rows(self, needed: int) -> int:
        """The least of `rows`, a quarter of them, a sixteenth .. that is enough: few programs, and
        a straggler does not compute a whole batch of padding."""
        size = self.rows
        while size % _ROWS_SHARE == 0 and size // _ROWS_SHARE >= needed:
            size //= _ROWS_SHARE
        return size


class _Request(NamedTuple):
    token_ids: np.ndarray
    future: concurrent.futures.Future[float]


class RewardModelScorer:
    """A `Scorer`: the reward model's score of prompt and completion.

    Usable from several threads and event loops at once. A text longer than the model's context has
    no score: the error is `reward_model_context`. An error of the device is raised where the score
    is awaited.
    """

    def __init__(self, model: RewardModelOnDevice, *, tokens_of: TokensOf) -> None:
        self._model = model
        self._tokens_of = tokens_of
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counts = StreamCounts()
        self._thread = threading.Thread(target=self._work, name="reward_model", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> StreamCounts:
        """A copy; nothing is streamed, so every token is read after its completion's end."""
        with self._lock:
            return dataclasses.replace(self._counts)

    async def score(self, completion: Completion) -> Score:
        token_ids = self._tokens_of(completion)
        if not 0 < token_ids.size <= self._model.max_tokens:
            detail = (
                f"{token_ids.size} tokens, the reward model reads 1 to {self._model.max_tokens}"
            )
            return Score(value=0.0, error="reward_model_context", detail=detail)
        future: concurrent.futures.Future[float] = concurrent.futures.Future()
        self._requests.put(_Request(token_ids, future))
        return Score(value=await asyncio.wrap_future(future))

    async def close(self) -> None:
        """Ends the thread after what has been asked for. Safe to call twice."""
        self._requests.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_SECONDS)

    def _work(self) -> None:
        open_ = True
        while open_:
            batch = [self._requests.get()]
            with contextlib.suppress(queue.Empty):
                while batch[-1] is not None and len(batch) < self._model.rows:
                    batch.append(self._requests.get_nowait())
            open_ = batch[-1] is not None
            self._answer([r for r in batch if r and r.future.set_running_or_notify_cancel()])

    def _answer(self, requests: Sequence[_Request]) -> None:
        if not requests:
            return
        texts, start = [request.token_ids for request in requests], time.monotonic()
        try:
            with span("score_texts"):
                scores = self._model.scores(texts)
        except BaseException as error:  # noqa: BLE001  # it is raised where it is awaited
            for request in requests:
                request.future.set_exception(error)
            return
        with self._lock:
            self._counts.busy_seconds += time.monotonic() - start
            self._counts.final_tokens += sum(text.size for text in texts)
            self._counts.device_calls += 1
            self._counts.finished += len(texts)
        for request, score in zip(requests, scores, strict=True):
            request.future.set_result(float(score))

"""A frozen model on the scoring mesh that reads rows of text piece by piece.

Owns weights, cache and compiled programs of streamed scoring: one device call per `extend`. Whose
text is in which row is `streaming.py`; the arithmetic is `models/incremental_forward.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pipeline_rl_jax.algorithms.packing import padded_size
from pipeline_rl_jax.meshes import replicated
from pipeline_rl_jax.models.chunk_readouts import Readout
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.incremental_forward import (
    RowCache,
    RowChunks,
    cache_shardings,
    empty_rows,
    extend_rows,
    resized_rows,
    unstack_layers,
)

_CALL_TOKENS = 64  # what a device call costs whatever its size, as tokens computed
_FEW_ROWS_SHARE = 4  # programs exist for all rows and for this part of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamShape:
    """The fixed shapes of streamed scoring."""

    rows: int  # texts that are read at once
    max_tokens: int  # of one text, prompt and completion
    chunk_widths: tuple[int, ...]  # tokens per row that a device call may have, ascending
    min_cache_tokens: int  # positions of the smallest cache; doubled as texts grow
    cache_dtype: str = "bfloat16"
    compute_dtype: str = "bfloat16"

    def check(self, config: ModelConfig, *, section: str) -> None:
        """ValueError, naming the setting below `section`, when the shapes make no sense."""
        widths = self.chunk_widths
        if self.rows < 1:
            raise ValueError(f"{section}.rows ({self.rows}) must be 1 or more")
        if not widths or widths[0] < 1 or list(widths) != sorted(set(widths)):
            raise ValueError(
                f"{section}.chunk_widths {widths} must be ascending and positive; for example "
                "(32, 128, 512)"
            )
        if self.min_cache_tokens < 1:
            raise ValueError(
                f"{section}.min_cache_tokens ({self.min_cache_tokens}) must be 1 or more"
            )
        if self.max_tokens > config.max_positions:
            raise ValueError(
                f"{section}: texts of {self.max_tokens} tokens do not fit the model's context of "
                f"{config.max_positions}; lower generation.max_prompt_tokens or "
                "generation.max_new_tokens"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowTokens:
    """The next tokens of one row."""

    row: int
    token_ids: np.ndarray  # [c] int32, what is known of it and not yet read
    start: int  # tokens of the row that were read before
    prompt_length: int


class StreamedModel:
    """Rows 0 .. `num_rows` − 1, extended by chunks; not thread-safe.

    Args:
      params: as of `models/loading.py` or `hf_reward.py`, on `mesh`; only read.
      readout: one of `chunk_readouts.py`, that params and model fit.
      order: held while a program is dispatched; see `preprocess/reference.py`.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Any],
        *,
        readout: Readout,
        shape: StreamShape,
        mesh: Mesh,
        order: contextlib.AbstractContextManager | None = None,
    ) -> None:
        self.shape = shape
        self.num_rows = shape.rows + 1  # one is kept for a text that ends while it waits for a row
        self._config = config
        self._order = order or contextlib.nullcontext()
        self._host_arrays = replicated(mesh)
        caches = cache_shardings(config, mesh)

        def extend(
            params: Mapping[str, Any], cache: RowCache, chunks: RowChunks
        ) -> tuple[jax.Array, RowCache]:
            states, cache = extend_rows(
                params, cache, chunks, config=config, cache_dtype=shape.cache_dtype
            )
            return readout(params, states, chunks), cache

        def empty() -> RowCache:
            return empty_rows(
                config,
                rows=self.num_rows,
                cache_tokens=self._cache_tokens(1),
                cache_dtype=shape.cache_dtype,
                compute_dtype=shape.compute_dtype,
            )

        self._extend = jax.jit(extend, donate_argnums=1, out_shardings=(self._host_arrays, caches))
        self._resize = jax.jit(resized_rows, static_argnums=1, out_shardings=caches)
        self._unstack = jax.jit(unstack_layers, static_argnums=1)
        self.replace_params(params)
        with self._order:
            self._cache = jax.jit(empty, out_shardings=caches)()

    def replace_params(self, params: Mapping[str, Any]) -> None:
        """Reads on with other weights, of which a copy is made; what has been read stays."""
        with self._order:
            self._params = self._unstack(params, self._config)

    @property
    def num_cache_tokens(self) -> int:
        """Positions each row has now."""
        return self._cache.num_positions

    def reserve(self, longest_tokens: int) -> None:
        """Gives every row the positions that texts of up to `longest_tokens` need, and no more."""
        wanted = self._cache_tokens(longest_tokens)
        if wanted != self._cache.num_positions:
            with self._order:
                self._cache = self._resize(self._cache, wanted)

    def extend(self, entries: Sequence[RowTokens]) -> tuple[list[tuple[int, np.ndarray]], int]:
        """One device call: reads as much of the entries as fits into a chunk.

        Returns, entry by entry, the tokens read and the readout of them (a scalar, or an array of
        as many), and the number of tokens computed, padding and all. Waits for the result.
        """
        size, width = self._call_shape([entry.token_ids.size for entry in entries])
        token_ids = np.zeros((size, width), np.int32)
        rows = np.full(size, self.num_rows, np.int32)
        lengths, starts, prompt_lengths = np.zeros((3, size), np.int32)
        for i, entry in enumerate(entries):
            taken = min(entry.token_ids.size, width)
            token_ids[i, :taken] = entry.token_ids[:taken]
            rows[i], lengths[i], starts[i] = entry.row, taken, entry.start
            prompt_lengths[i] = entry.prompt_length
        arrays = (rows, token_ids, lengths, starts, prompt_lengths)
        chunks = RowChunks(*jax.device_put(arrays, self._host_arrays))
        with self._order:
            result, self._cache = self._extend(self._params, self._cache, chunks)
        values = np.asarray(jax.device_get(result))
        read = [
            (int(lengths[i]), value[: lengths[i]] if value.ndim else value)
            for i, value in zip(range(len(entries)), values, strict=False)
        ]
        return read, size * width

    def _call_shape(self, pending: Sequence[int]) -> tuple[int, int]:
        """(rows, width) of the call for texts with so many unread tokens.

        The width that reads most tokens for what it costs: one long prompt does not make all
        other rows compute its padding.
        """
        few = -(-self.num_rows // _FEW_ROWS_SHARE)
        size = few if len(pending) <= few else self.num_rows

        def worth(width: int) -> float:
            return sum(min(tokens, width) for tokens in pending) / (size * width + _CALL_TOKENS)

        return size, max(self.shape.chunk_widths, key=worth)

    def _cache_tokens(self, longest_tokens: int) -> int:
        tokens = padded_size(longest_tokens, self.shape.min_cache_tokens)
        return min(tokens, self.shape.max_tokens)

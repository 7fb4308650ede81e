"""Logprobs of packed batches under a policy that stays as it is.

Owns the frozen weights on their mesh and the loop over micro-batches. Which weights these are and
where they are read from is in `orchestrate/reference_model.py`; what a KL to them is for, in
`algorithms/`.
"""

from __future__ import annotations

import contextlib

import jax
import numpy as np
from jax.sharding import Mesh

from pipeline_rl_jax.meshes import row_sharding
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.loading import build_model
from pipeline_rl_jax.models.packed_forward import TokenRows, score_rows
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import Settings


class ReferencePolicy:
    """A model that scores what another one wrote, at the temperature it was sampled with."""

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        *,
        settings: Settings,
        mesh: Mesh,
        order: contextlib.AbstractContextManager,
    ) -> None:
        """`params` lie on `mesh` and are only read.

        `order` is held while a program is dispatched. Whoever else dispatches to the devices of
        `mesh` holds it too: collectives that two threads send to the same devices in different
        orders would lock them up.
        """
        graph = build_model(config, settings.model)

        def score(params: dict, rows: TokenRows) -> jax.Array:
            return score_rows(graph, params, rows, settings=settings, mesh=mesh).logprobs

        self._params = params
        self._rows_at_once = settings.trainer.rows_per_micro_batch
        self._rows = row_sharding(mesh)
        self._score = jax.jit(score, out_shardings=self._rows)
        self._order = order

    def logprobs(self, batch: PackedBatch) -> np.ndarray:
        """log π_ref(y_t|·) of every loss token, float32 [R, T], 0 elsewhere.

        Rows are taken `trainer.rows_per_micro_batch` at a time, so that all batches share one
        compiled program; those that hold nothing are left out. Waits for the result.
        """
        size = self._rows_at_once
        parts = []
        for start in range(0, int(batch.num_rows), size):
            rows = TokenRows.of(batch, slice(start, start + size))
            with self._order:
                parts.append(self._score(self._params, jax.device_put(rows, self._rows)))
        logprobs = np.zeros(batch.token_ids.shape, np.float32)
        for index, part in enumerate(jax.device_get(parts)):
            logprobs[index * size : (index + 1) * size] = part
        return logprobs

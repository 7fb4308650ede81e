"""Logprobs of packed batches under a policy that stays as it is.

Owns the frozen weights on their mesh and the loop over micro-batches. Which weights these are and
where they are read from is in `orchestrate/reference_model.py`; what a KL to them is for, in
`algorithms/`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.held_params import HeldParams
from pipeline_rl_jax.models.packed_forward import TokenRows, build_logprobs, score_batch
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
        offloaded: bool = False,
    ) -> None:
        """`params` lie on `mesh` and are only read; `offloaded`, between two batches on the host.

        `order` is held while a program is dispatched. Whoever else dispatches to the devices of
        `mesh` holds it too: collectives that two threads send to the same devices in different
        orders would lock them up.
        """
        self._params = HeldParams(params, offloaded=offloaded)
        self._rows_at_once = settings.trainer.rows_per_micro_batch
        self._mesh = mesh
        self._score = build_logprobs(config, settings, mesh=mesh)
        self._order = order

    def logprobs(self, batch: PackedBatch) -> np.ndarray:
        """log π_ref(y_t|·) of every loss token, float32 [R, T], 0 elsewhere.

        `trainer.rows_per_micro_batch` rows at a time; waits for the result.
        """
        with self._params.on_devices() as params:
            return score_batch(
                functools.partial(self._dispatch, params),
                batch,
                rows_at_once=self._rows_at_once,
                mesh=self._mesh,
            )

    def _dispatch(self, params: Mapping[str, Any], rows: TokenRows) -> Any:
        with self._order:
            return self._score(params, rows)

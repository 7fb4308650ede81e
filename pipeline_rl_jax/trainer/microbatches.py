"""How an optimizer batch reaches the trainer mesh.

Owns the layout [M, r, T] of micro-batches and the explicit move to the devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pipeline_rl_jax.meshes import replicated, row_sharding
from pipeline_rl_jax.records import PackedBatch


def place_batch(batch: PackedBatch, *, rows_per_micro_batch: int, mesh: Mesh) -> PackedBatch:
    """Rows [R, T] as [M, r, T] on the mesh, r = `rows_per_micro_batch`, r split over data and fsdp.

    The loop over micro-batches indexes M, which no mesh axis splits, so that taking one moves
    nothing. Returns at once. Raises ValueError unless R is a multiple of r.
    """
    num_rows = batch.token_ids.shape[0]
    if num_rows % rows_per_micro_batch:
        raise ValueError(
            f"a batch of {num_rows} rows is no multiple of trainer.rows_per_micro_batch "
            f"({rows_per_micro_batch}); pad it with empty rows"
        )
    rows, everywhere = row_sharding(mesh, row_axis=1), replicated(mesh)

    def place(array: Any) -> Any:
        if array is None:
            return None
        array = np.asarray(array)
        if array.ndim == 0:
            return jax.device_put(array, everywhere)
        return jax.device_put(array.reshape(-1, rows_per_micro_batch, *array.shape[1:]), rows)

    return PackedBatch(
        **{
            field.name: place(getattr(batch, field.name))
            for field in dataclasses.fields(PackedBatch)
        }
    )

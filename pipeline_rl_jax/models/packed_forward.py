"""The forward pass over packed rows, as everything that scores given tokens runs it.

Owns how a model's weights and rows meet on a mesh with the axes data, fsdp and tensor. The policy
in training and the reference policy go through here alike, so that equal weights give equal
logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline_rl_jax.meshes import row_sharding
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.loading import build_model
from pipeline_rl_jax.models.token_logprobs import token_logprobs
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import Settings

_Scored = TypeVar("_Scored")


class TokenRows(NamedTuple):
    """Of a `PackedBatch`, what a forward pass reads; arrays [r, T]."""

    token_ids: np.ndarray | jax.Array
    positions: np.ndarray | jax.Array
    segment_ids: np.ndarray | jax.Array
    loss_mask: np.ndarray | jax.Array

    @classmethod
    def of(cls, batch: PackedBatch, rows: slice = slice(None)) -> TokenRows:
        return cls(*(getattr(batch, name)[rows] for name in cls._fields))


class ScoredRows(NamedTuple):
    """What the model says of the tokens of some rows; entry t describes token t."""

    hidden: jax.Array  # [r, T, D] final hidden states, at (not before) each token
    logprobs: jax.Array  # [r, T] float32, 0 outside the loss mask
    entropies: jax.Array  # [r, T] float32 nats, 0 outside the loss mask


def score_rows(
    graph: nnx.GraphDef,
    params: dict,
    rows: TokenRows,
    *,
    settings: Settings,
    mesh: Mesh,
) -> ScoredRows:
    """Logprobs and entropies of the rows' loss tokens, at the temperature they are sampled with.

    `graph` from `loading.build_model`, `params` the weights of that model and no others.
    """
    # The look-up of rows that lie on other devices stays local once the width is whole.
    embedding = jax.lax.with_sharding_constraint(
        params["embedding"], NamedSharding(mesh, PartitionSpec("tensor", None))
    )
    model = nnx.merge(graph, params | {"embedding": embedding})
    token_ids, positions, segment_ids, loss_mask = map(jnp.asarray, rows)
    hidden = model(token_ids, positions=positions, segment_ids=segment_ids)
    hidden = jax.lax.with_sharding_constraint(hidden, row_sharding(mesh))
    logprobs, entropies = token_logprobs(
        hidden,
        model.output_embedding,
        token_ids,
        loss_mask,
        temperature=settings.generation.temperature,
        chunk_tokens=settings.model.logprob_chunk_tokens,
    )
    return ScoredRows(hidden, logprobs, entropies)


def build_logprobs(
    config: ModelConfig, settings: Settings, *, mesh: Mesh
) -> Callable[[Mapping[str, Any], TokenRows], jax.Array]:
    """The compiled `(params, rows) → logprobs [r, T]`, 0 outside the loss mask."""
    graph = build_model(config, settings.model)

    def score(params: dict, rows: TokenRows) -> jax.Array:
        return score_rows(graph, params, rows, settings=settings, mesh=mesh).logprobs

    return jax.jit(score, out_shardings=row_sharding(mesh))


def score_batch(
    run: Callable[[TokenRows], _Scored], batch: PackedBatch, *, rows_at_once: int, mesh: Mesh
) -> _Scored:
    """What `run` says of the rows of a batch, as numpy arrays [R, T]; waits for it.

    Rows are taken `rows_at_once` at a time, so that all batches share one compiled program; those
    that hold nothing are left out and read 0.
    """
    num_rows = int(batch.num_rows)
    placement = row_sharding(mesh)
    parts = [
        run(jax.device_put(TokenRows.of(batch, slice(start, start + rows_at_once)), placement))
        for start in range(0, num_rows, rows_at_once)
    ]
    missing = batch.token_ids.shape[0] - len(parts) * rows_at_once

    def join(*arrays: np.ndarray) -> np.ndarray:
        return np.pad(np.concatenate(arrays), ((0, missing), (0, 0)))

    return jax.tree.map(join, *jax.device_get(parts))

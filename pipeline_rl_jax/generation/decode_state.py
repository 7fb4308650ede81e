"""The immutable state of a decode loop: caches and what every slot is writing.

Owns `DecodeState`, its sharding, and the pure functions that change it outside of decoding
(insert, free, resize). One cache array per layer, so that each is updated in place:

    keys[l], values[l]   [slots, K, S, H]      slot 0 |prompt|completion ...|  free      |
                                               slot 1 |prompt|compl.|        free        |
                                                              ^ lengths[slot]

Position `lengths[slot]` belongs to `tokens[slot]`, which is known but not yet in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline_rl_jax.generation.engine import SlotRequest
from pipeline_rl_jax.models.cache_storage import cache_storage
from pipeline_rl_jax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys and values of all layers, L arrays each, in the storage dtype of `cache_storage`."""

    keys: tuple[jax.Array, ...]  # [slots, K, S, H]
    values: tuple[jax.Array, ...]  # [slots, K, S, H]

    @property
    def num_positions(self) -> int:
        return self.keys[0].shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """All arrays have a leading axis of slots."""

    cache: Cache
    tokens: jax.Array  # int32, the token to feed next
    lengths: jax.Array  # int32, positions of the cache in use
    active: jax.Array  # bool, the slot is writing
    prompt_ids: jax.Array  # int32
    sample_indices: jax.Array  # int32
    num_generated: jax.Array  # int32, tokens of the completion so far
    max_new_tokens: jax.Array  # int32
    temperatures: jax.Array  # float32


def cache_sharding(mesh: Mesh, config: ModelConfig, *, slot_axis: str | None) -> NamedSharding:
    """Of one cache array: slots over `slot_axis`, KV heads over `tensor` where they divide."""
    split_heads = config.num_kv_heads % mesh.shape["tensor"] == 0
    return NamedSharding(mesh, PartitionSpec(slot_axis, "tensor" if split_heads else None))


def state_sharding(mesh: Mesh, config: ModelConfig) -> Any:
    """A `DecodeState` with a sharding at every leaf: slots over `data`."""
    layers = (cache_sharding(mesh, config, slot_axis="data"),) * config.num_layers
    slots = NamedSharding(mesh, PartitionSpec("data"))
    fields: dict[str, Any] = {field.name: slots for field in dataclasses.fields(DecodeState)}
    fields["cache"] = Cache(keys=layers, values=layers)  # type: ignore[arg-type]
    return DecodeState(**fields)


def empty_state(
    config: ModelConfig, *, slots: int, cache_tokens: int, cache_dtype: str
) -> DecodeState:
    """Every slot free."""
    shape = (slots, config.num_kv_heads, cache_tokens, config.head_width)

    def arrays() -> tuple[jax.Array, ...]:
        storage = cache_storage(cache_dtype)
        return tuple(jnp.zeros(shape, storage) for _ in range(config.num_layers))

    def zeros(dtype: jnp.dtype = jnp.int32) -> jax.Array:
        return jnp.zeros((slots,), dtype)

    return DecodeState(
        cache=Cache(keys=arrays(), values=arrays()),
        tokens=zeros(),
        lengths=zeros(),
        active=zeros(jnp.bool_),
        prompt_ids=zeros(),
        sample_indices=zeros(),
        num_generated=zeros(),
        max_new_tokens=zeros(),
        temperatures=zeros(jnp.float32),
    )


def request_arrays(requests: Sequence[SlotRequest], num_slots: int) -> dict[str, np.ndarray]:
    """Requests as arrays padded to `num_slots` rows; `count` says how many are real."""
    fields = [field.name for field in dataclasses.fields(SlotRequest)]
    arrays: dict[str, np.ndarray] = {name: np.zeros(num_slots, np.int32) for name in fields}
    arrays["temperature"] = np.zeros(num_slots, np.float32)
    for i, request in enumerate(requests):
        for name in fields:
            arrays[name][i] = getattr(request, name)
    arrays["count"] = np.asarray(len(requests), np.int32)
    return arrays


def insert_requests(
    state: DecodeState, prefix: Cache, requests: dict[str, jax.Array]
) -> DecodeState:
    """Writes prefix rows and slot descriptions, one request after the other, caches in place."""

    def body(i: jax.Array, state: DecodeState) -> DecodeState:
        slot, row = requests["slot"][i], requests["row"][i]

        def put(cache: jax.Array, rows: jax.Array) -> jax.Array:
            taken = jax.lax.dynamic_slice_in_dim(rows, row, 1, axis=0)
            width = min(taken.shape[2], cache.shape[2])  # a bucket may be wider than the cache
            return jax.lax.dynamic_update_slice(cache, taken[:, :, :width], (slot, 0, 0, 0))

        def field(array: jax.Array, name: str) -> jax.Array:
            return array.at[slot].set(requests[name][i])

        return DecodeState(
            cache=jax.tree.map(put, state.cache, prefix),
            tokens=field(state.tokens, "last_token"),
            lengths=field(state.lengths, "length"),
            active=state.active.at[slot].set(True),
            prompt_ids=field(state.prompt_ids, "prompt_id"),
            sample_indices=field(state.sample_indices, "sample_index"),
            num_generated=field(state.num_generated, "num_generated"),
            max_new_tokens=field(state.max_new_tokens, "max_new_tokens"),
            temperatures=field(state.temperatures, "temperature"),
        )

    return jax.lax.fori_loop(0, requests["count"], body, state)


def taken(state: DecodeState, slots: jax.Array) -> DecodeState:
    """The slots [N] of a state, in this order; a negative number is a free slot. Without caches.

    Slots are rows like any other: nothing that is written depends on which row it is in.
    """
    fields = {
        field.name: take_slots(getattr(state, field.name), slots)
        for field in dataclasses.fields(state)
        if field.name != "cache"
    }
    fields["active"] = fields["active"] & (slots >= 0)
    return dataclasses.replace(state, **fields)


def take_slots(array: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows of one array; what a negative number finds is junk."""
    return jnp.take(array, jnp.maximum(slots, 0), axis=0)

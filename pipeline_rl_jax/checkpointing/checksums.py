"""Sums over the bits of tensors, by which a damaged checkpoint shows.

Owns the sum: all bits of a tensor as unsigned words, added up modulo 2^32. It does not depend on
how a tensor is spread over devices, and each device adds up its own part, so that nothing passes
between devices. What is compared with what is in `store.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MODULUS = 2**32
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def bit_sums(tensors: Mapping[str, Any]) -> dict[str, int]:
    """The sum of each tensor, arrays on devices or on the host."""
    parts = {name: _part_sums(tensor) for name, tensor in tensors.items()}
    return {
        name: sum(int(part) for part in sums) % _MODULUS
        for name, sums in jax.device_get(parts).items()
    }


def _part_sums(tensor: Any) -> list[Any]:
    """Of a tensor's parts, each once, however many devices have copies; may still be computed."""
    if not isinstance(tensor, jax.Array):
        words = np.ascontiguousarray(tensor).reshape(-1).view(_WORDS[tensor.dtype.itemsize])
        return [np.sum(words, dtype=np.uint32)]
    return [_word_sum(part.data) for part in tensor.addressable_shards if part.replica_id == 0]


@jax.jit
def _word_sum(values: jax.Array) -> jax.Array:
    words = jax.lax.bitcast_convert_type(values, _WORDS[values.dtype.itemsize])
    return jnp.sum(words, dtype=jnp.uint32)

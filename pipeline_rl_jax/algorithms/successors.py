"""Which trainable token follows which, within a segment of a packed row.

Owns the order that reverse scans follow: tokens outside the mask are passed over wherever they
stand, and nothing leads from one segment into another or into padding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Successors(NamedTuple):
    """Per token, the next trainable one of its segment."""

    exists: Bool[Array, "R T"]
    column: Int[Array, "R T"]  # where it stands in the row; 0 where there is none


def find_successors(mask: Bool[Array, "R T"], segment_ids: Int[Array, "R T"]) -> Successors:
    """The first t' > t with `mask` in the segment of t; asked of masked tokens too."""
    width = mask.shape[1]
    columns = jnp.where(mask, jnp.arange(width, dtype=jnp.int32), width)
    at_or_after = jax.lax.cummin(columns, axis=1, reverse=True)
    after = jnp.pad(at_or_after[:, 1:], ((0, 0), (0, 1)), constant_values=width)
    column = jnp.where(after < width, after, 0)
    same_segment = jnp.take_along_axis(segment_ids, column, axis=1) == segment_ids
    exists = (after < width) & same_segment
    return Successors(exists=exists, column=jnp.where(exists, column, 0))


def last_tokens(mask: Bool[Array, "R T"], segment_ids: Int[Array, "R T"]) -> Bool[Array, "R T"]:
    """True at the last trainable token of every segment that has one."""
    return mask & ~find_successors(mask, segment_ids).exists

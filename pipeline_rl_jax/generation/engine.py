"""What a generation engine is: JetStream's verbs, with log-probabilities mandatory.

Owns the `Engine` protocol and the arrays that cross it. Two things differ from JetStream by design:
`params` is an argument of every call that computes (which is what makes an in-flight update a
non-event), and prefill samples nothing: every token, the first included, comes from `generate`,
so that one prompt's prefix serves its whole group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

Params = Any  # the engine's own weight layout, as `load_params` returns it
Prefix = Any  # keys and values of prefilled prompts
DecodeState = Any  # caches and per-slot state, immutable


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotRequest:
    """What one slot shall write: row `row` of a prefix, continued under its own randomness."""

    slot: int
    row: int
    last_token: int  # last known token; its keys and values are computed by the next `generate`
    length: int  # tokens before `last_token`, all of them in the prefix
    prompt_id: int
    sample_index: int
    num_generated: int  # tokens of the completion that exist already, 0 for a fresh prompt
    max_new_tokens: int  # of the whole completion
    temperature: float  # 0 = greedy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultTokens:
    """What one `generate` wrote. Entries at and after `counts[slot]` are meaningless."""

    token_ids: np.ndarray | jax.Array  # [slots, C] int32
    logprobs: np.ndarray | jax.Array  # [slots, C] float32
    counts: np.ndarray | jax.Array  # [slots] int32, tokens written by each slot in this chunk
    stopped: np.ndarray | jax.Array  # [slots] bool, the last token written is a stop token

    def fetch(self) -> ResultTokens:
        """The same on the host: the one transfer of a chunk."""
        return jax.device_get(self)


class Engine(Protocol):
    """A fixed set of slots that decode together."""

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        ...

    @property
    def samples_per_slot(self) -> int:
        """Sequences a slot holds: 1."""
        ...

    @property
    def max_prefill_length(self) -> int:
        """Longest prefix, in tokens."""
        ...

    @property
    def mesh(self) -> Mesh: ...

    def load_params(self, params: Params) -> Params:
        """Trainer-layout weights → this engine's layout, dtype and sharding."""
        ...

    def init_decode_state(self) -> DecodeState:
        """All slots free, caches at their smallest size."""
        ...

    def prefill(
        self, *, params: Params, padded_tokens: np.ndarray, true_lengths: np.ndarray
    ) -> Prefix:
        """Keys and values of `padded_tokens` [rows, bucket]; past a row's length they are junk."""
        ...

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: SlotRequest) -> DecodeState:
        """Puts one row of a prefix into one slot."""
        ...

    def bulk_insert(
        self, prefix: Prefix, decode_state: DecodeState, slots: Sequence[SlotRequest]
    ) -> DecodeState:
        """Repeated `insert` in one call."""
        ...

    def generate(
        self, params: Params, decode_state: DecodeState, *, max_steps: int | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """Up to K tokens for every live slot; ends early when none is live any more.

        K is `max_steps`, at most what the engine was built for, which it is if not given. It is
        not compiled in: it may change from call to call.
        """
        ...

    def free_resource(self, decode_state: DecodeState, slot: int) -> DecodeState:
        """Ends what `slot` holds; it takes part in no further step."""
        ...

    def take_slots(self, decode_state: DecodeState, slots: np.ndarray) -> DecodeState:
        """A state of these slots [N] in this order, N as many as there are then; -1 = a free one.

        Lets a batch that drains go on in fewer slots, and grow again. N is at most
        `max_concurrent_decodes`, and compiled for each N.
        """
        ...

    def resize(self, decode_state: DecodeState, *, cache_tokens: int) -> DecodeState:
        """The same state with caches of `cache_tokens` positions a slot."""
        ...

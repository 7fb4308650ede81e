"""The vocabulary: every type that crosses a border between two packages.

Owns the records and nothing else: no logic beyond derived properties. Entry `t` of every
per-token array describes token `t` itself; the shift by one that a language model needs happens
only in `models/token_logprobs.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import jax
import numpy as np


class StopReason(enum.Enum):
    """Why a completion ended."""

    EOS = "eos"  # the model wrote an end-of-sequence token (kept as the last token)
    STOP_STRING = "stop_string"  # the text reached a stop string (the tokens that made it are kept)
    MAX_NEW_TOKENS = "max_new_tokens"  # cut at generation.max_new_tokens
    CONTEXT_LIMIT = "context_limit"  # cut because the cache holds no further position
    CANCELLED = "cancelled"  # given up on by the schedule; never trained on

    @property
    def truncated(self) -> bool:
        """True when the model would have gone on writing."""
        return self in (StopReason.MAX_NEW_TOKENS, StopReason.CONTEXT_LIMIT)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One problem, tokenized.

    `prompt_id` is unique over a run (epoch * records + record index), does not depend on the order
    of admission, and is one of the four inputs of sampling randomness.
    """

    prompt_id: int
    token_ids: np.ndarray  # [P] int32
    text: str  # what token_ids encode, for people and logs only
    answer: str  # the gold answer as the data set gives it
    task: str = ""  # data set or task name, e.g. "gsm8k"; metrics are split by it
    metadata: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """The tokens one slot received in one call of `Engine.generate`."""

    prompt: Prompt
    sample_index: int
    start: int  # index in the completion of the first token of this chunk
    token_ids: np.ndarray  # [C] int32
    logprobs: np.ndarray  # [C] float32
    weight_version: int
    stop_reason: StopReason | None  # None while the completion goes on


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """What the model wrote after a prompt, token by token with its provenance."""

    prompt: Prompt
    sample_index: int  # which member of its group
    token_ids: np.ndarray  # [C] int32
    logprobs: np.ndarray  # [C] float32, of the distribution really sampled from
    weight_versions: np.ndarray  # [C] int32, optimizer steps applied to the weights that sampled t
    stop_reason: StopReason
    text: str = ""  # decoded once, for rewards and logs; never encoded again
    started_seconds: float = 0.0  # time.monotonic() when its slot was filled
    finished_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def mixes_versions(self) -> bool:
        """True when more than one weight version wrote this completion."""
        versions = self.weight_versions
        return bool(versions.size) and int(versions.min()) != int(versions.max())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """A completion and what it earned."""

    completion: Completion
    reward: float
    reward_components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # [C] float32, when the reference policy read the completion while it was being written:
    reference_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None  # [C] float32, likewise of the critic, before each token


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one prompt; fewer than asked for when some were dropped."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One optimizer batch: rollouts laid end to end in rows of equal length.

    R rows (a multiple of `trainer.rows_per_micro_batch`), T tokens a row. Tokens attend only within
    their segment. Prompt tokens and padding carry zeros and `loss_mask == False`.
    """

    token_ids: np.ndarray | jax.Array  # [R, T] int32
    segment_ids: np.ndarray | jax.Array  # [R, T] int32, 1.. within a row, 0 is padding
    positions: np.ndarray | jax.Array  # [R, T] int32, from 0 in every segment
    loss_mask: np.ndarray | jax.Array  # [R, T] bool, True at completion tokens to train on
    sequence_index: np.ndarray | jax.Array  # [R, T] int32, rollout number in the batch, -1 padding
    behaviour_logprobs: np.ndarray | jax.Array  # [R, T] float32
    advantages: np.ndarray | jax.Array  # [R, T] float32
    returns: np.ndarray | jax.Array  # [R, T] float32, target of a value head (reward to go)
    reference_logprobs: np.ndarray | jax.Array  # [R, T] float32, zeros when not asked for
    weight_versions: np.ndarray | jax.Array  # [R, T] int32, -1 at prompt tokens and padding
    num_sequences: np.ndarray | jax.Array  # [] int32, B: rollouts in this optimizer batch
    num_rows: np.ndarray | jax.Array  # [] int32, rows that hold anything; the rest is padding
    # Where the estimation of advantages asks for them, else None:
    truncated: np.ndarray | jax.Array | None = None  # [R, T] bool, loss tokens of cut completions
    values: np.ndarray | jax.Array | None = None  # [R, T] float32, predicted before the updates

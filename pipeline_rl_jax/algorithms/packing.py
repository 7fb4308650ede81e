"""Laying rollouts end to end in rows of equal length.

Owns the plan (which rollout goes where) and the arrays of a `PackedBatch`. Deterministic: the same
rollouts in the same order give the same batch. Runs on the host, numpy only.

    row 0 | prompt a | completion a | prompt c | completion c | padding |
            segment 1 ............... segment 2 ............... 0
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from pipeline_rl_jax.records import Completion, PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSequence:
    """A completion with its learning signal: one number for all its tokens, or one per token."""

    completion: Completion
    advantages: float | np.ndarray  # scalar or [C]
    returns: float | np.ndarray  # scalar or [C]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion together."""
        return self.completion.prompt.token_ids.shape[0] + self.completion.num_tokens


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one rollout lies: its row, the column of its first token, its number in the row."""

    row: int
    start: int
    segment: int  # 1..


def pack(
    sequences: Sequence[TrainingSequence], *, tokens_per_row: int, rows_per_micro_batch: int
) -> PackedBatch:
    """One optimizer batch of numpy arrays; `sequence_index` i is `sequences[i]`.

    Rows are filled first-fit decreasing. Their number is padded so that there are a power of two
    of micro-batches: few distinct shapes to compile for, and `num_rows` tells the trainer where
    to stop. A completion without tokens is packed as its prompt, with nothing to train on.
    Raises ValueError for no sequence at all, for an empty prompt (nothing would predict the first
    token), and for a rollout longer than a row.
    """
    if not sequences:
        raise ValueError("pack needs at least one sequence")
    for sequence in sequences:
        _check(sequence, tokens_per_row)
    placements = plan_rows([s.num_tokens for s in sequences], tokens_per_row=tokens_per_row)
    num_rows = 1 + max(placement.row for placement in placements)
    shape = (padded_size(num_rows, rows_per_micro_batch), tokens_per_row)
    arrays = _empty_arrays(shape)
    for index, (sequence, placement) in enumerate(zip(sequences, placements, strict=True)):
        _write(arrays, sequence, placement=placement, index=index)
    return PackedBatch(
        **arrays,
        num_sequences=np.asarray(len(sequences), np.int32),
        num_rows=np.asarray(num_rows, np.int32),
    )


def with_signals(batch: PackedBatch, *, advantages: np.ndarray, returns: np.ndarray) -> PackedBatch:
    """The batch with one advantage and one return for all loss tokens of a sequence, [B] each."""
    mask, sequence_index = np.asarray(batch.loss_mask), np.asarray(batch.sequence_index)

    def spread(values: np.ndarray) -> np.ndarray:
        return np.where(mask, np.asarray(values, np.float32)[sequence_index], np.float32(0.0))

    return dataclasses.replace(batch, advantages=spread(advantages), returns=spread(returns))


def with_truncated(batch: PackedBatch, truncated: np.ndarray) -> PackedBatch:
    """The batch with all loss tokens of the sequences marked that a limit cut, [B] bool."""
    mask, sequence_index = np.asarray(batch.loss_mask), np.asarray(batch.sequence_index)
    return dataclasses.replace(batch, truncated=mask & np.asarray(truncated, bool)[sequence_index])


def take_sequences(
    batch: PackedBatch, chosen: np.ndarray, *, rows_per_micro_batch: int
) -> PackedBatch:
    """A batch of some of a batch's sequences, packed anew; `chosen[i]` becomes number i.

    All arrays that a batch has per token go with their tokens.
    """
    tokens_per_row = batch.token_ids.shape[1]
    places = _token_places(np.asarray(batch.sequence_index), chosen)
    placements = plan_rows([place.size for place in places], tokens_per_row=tokens_per_row)
    num_rows = 1 + max(placement.row for placement in placements)
    shape = (padded_size(num_rows, rows_per_micro_batch), tokens_per_row)
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    arrays = {name: np.asarray(array) for name, array in fields.items() if np.ndim(array) == 2}
    empty = _empty_arrays(shape)
    taken = {
        name: empty[name] if name in empty else np.zeros(shape, array.dtype)
        for name, array in arrays.items()
    }
    for index, (place, placement) in enumerate(zip(places, placements, strict=True)):
        target = placement.row, slice(placement.start, placement.start + place.size)
        for name, array in arrays.items():
            taken[name][target] = array.flat[place]
        taken["segment_ids"][target] = placement.segment
        taken["sequence_index"][target] = index
    return PackedBatch(
        **taken,
        num_sequences=np.asarray(len(chosen), np.int32),
        num_rows=np.asarray(num_rows, np.int32),
    )


def _token_places(sequence_index: np.ndarray, chosen: np.ndarray) -> list[np.ndarray]:
    """For each chosen sequence the places of its tokens in the flattened rows, in their order."""
    flat = sequence_index.ravel()
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    starts, ends = (np.searchsorted(ordered, chosen, side=side) for side in ("left", "right"))
    return [order[start:end] for start, end in zip(starts, ends, strict=True)]


def plan_rows(lengths: Sequence[int], *, tokens_per_row: int) -> list[Placement]:
    """First-fit decreasing: longest first (ties in order), each into the first row with room.

    Uses at most 11/9 of the least possible number of rows, plus one.
    """
    placements = [Placement(0, 0, 1)] * len(lengths)
    room = np.full(len(lengths), tokens_per_row, np.int64)  # at worst every rollout has a row
    used = np.zeros(len(lengths), np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = int(np.argmax(room >= lengths[index]))
        used[row] += 1
        placements[index] = Placement(row, int(tokens_per_row - room[row]), int(used[row]))
        room[row] -= lengths[index]
    return placements


def padded_size(needed: int, unit: int) -> int:
    """The least unit · 2^k that holds `needed`, which is 1 or more: few sizes, few compilations."""
    units = -(-needed // unit)
    return unit * (1 << (units - 1).bit_length())


def _check(sequence: TrainingSequence, tokens_per_row: int) -> None:
    prompt = sequence.completion.prompt
    if prompt.token_ids.shape[0] == 0:
        raise ValueError(
            f"prompt {prompt.prompt_id} has no tokens; nothing predicts its completion"
        )
    if sequence.num_tokens > tokens_per_row:
        raise ValueError(
            f"trainer.tokens_per_row ({tokens_per_row}) must hold the longest rollout; prompt "
            f"{prompt.prompt_id} and its completion have {sequence.num_tokens} tokens: raise it, "
            "or lower generation.max_prompt_tokens or generation.max_new_tokens"
        )


def _empty_arrays(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return {
        "token_ids": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, bool),
        "sequence_index": np.full(shape, -1, np.int32),
        "behaviour_logprobs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "returns": np.zeros(shape, np.float32),
        "reference_logprobs": np.zeros(shape, np.float32),
        "weight_versions": np.full(shape, -1, np.int32),
    }


def _write(
    arrays: dict[str, np.ndarray],
    sequence: TrainingSequence,
    *,
    placement: Placement,
    index: int,
) -> None:
    completion = sequence.completion
    border = placement.start + completion.prompt.token_ids.shape[0]
    whole = placement.row, slice(placement.start, placement.start + sequence.num_tokens)
    written = placement.row, slice(border, border + completion.num_tokens)
    arrays["token_ids"][whole] = np.concatenate([completion.prompt.token_ids, completion.token_ids])
    arrays["segment_ids"][whole] = placement.segment
    arrays["positions"][whole] = np.arange(sequence.num_tokens)
    arrays["sequence_index"][whole] = index
    arrays["loss_mask"][written] = True
    arrays["behaviour_logprobs"][written] = completion.logprobs
    arrays["advantages"][written] = sequence.advantages
    arrays["returns"][written] = sequence.returns
    arrays["weight_versions"][written] = completion.weight_versions

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_rl_jax.algorithms.packing import (
    TrainingSequence,
    pack,
    padded_size,
    plan_rows,
    with_signals,
)
from pipeline_rl_jax.records import PackedBatch
from tests.fakes.rollouts import make_completion, make_prompt


def make_sequence(prompt_id, token_ids, *, num_prompt_tokens=2, advantages=1.0, **completion):
    prompt = make_prompt(prompt_id, num_tokens=num_prompt_tokens)
    return TrainingSequence(
        completion=make_completion(prompt, token_ids, **completion),
        advantages=advantages,
        returns=0.5,
    )


def test_a_batch_by_hand():
    # Lengths 4, 3, 6, 2 in rows of 7: longest first gives [2 | pad], [0, 1]; 3 opens a third row.
    batch = pack(
        [
            make_sequence(0, [5, 6], logprobs=[-0.1, -0.2], versions=[3, 4], advantages=2.0),
            make_sequence(1, [3], logprobs=[-0.3], versions=[5], advantages=-1.0),
            make_sequence(2, [1, 2, 3, 4], versions=7, advantages=np.array([1, 2, 3, 4])),
            make_sequence(3, [], num_prompt_tokens=2),
        ],
        tokens_per_row=7,
        rows_per_micro_batch=1,
    )
    expected = PackedBatch(
        token_ids=[[2, 3, 1, 2, 3, 4, 0], [0, 1, 5, 6, 1, 2, 3], [3, 4, 0, 0, 0, 0, 0], [0] * 7],
        segment_ids=[[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0], [0] * 7],
        positions=[[0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0], [0] * 7],
        loss_mask=[[0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 1], [0] * 7, [0] * 7],
        sequence_index=[
            [2, 2, 2, 2, 2, 2, -1],
            [0, 0, 0, 0, 1, 1, 1],
            [3, 3, -1, -1, -1, -1, -1],
            [-1] * 7,
        ],
        behaviour_logprobs=[
            [0, 0, -1, -1, -1, -1, 0],
            [0, 0, -0.1, -0.2, 0, 0, -0.3],
            [0] * 7,
            [0] * 7,
        ],
        advantages=[[0, 0, 1, 2, 3, 4, 0], [0, 0, 2, 2, 0, 0, -1], [0] * 7, [0] * 7],
        returns=[[0, 0, 0.5, 0.5, 0.5, 0.5, 0], [0, 0, 0.5, 0.5, 0, 0, 0.5], [0] * 7, [0] * 7],
        reference_logprobs=[[0] * 7] * 4,
        weight_versions=[
            [-1, -1, 7, 7, 7, 7, -1],
            [-1, -1, 3, 4, -1, -1, 5],
            [-1] * 7,
            [-1] * 7,
        ],
        num_sequences=4,
        num_rows=3,
    )
    assert batch.values is None
    assert batch.truncated is None
    for name in PackedBatch.__dataclass_fields__.keys() - {"values", "truncated"}:
        np.testing.assert_allclose(
            getattr(batch, name), getattr(expected, name), rtol=1e-6, err_msg=name
        )
    assert batch.loss_mask.dtype == bool
    assert batch.behaviour_logprobs.dtype == np.float32
    assert batch.weight_versions.dtype == np.int32


def test_signals_of_sequences_reach_their_own_tokens_only():
    sequences = [make_sequence(0, [5, 6]), make_sequence(1, [3]), make_sequence(2, [])]
    batch = pack(sequences, tokens_per_row=7, rows_per_micro_batch=2)
    signals = {"advantages": np.array([2.0, -1.0, 9.0]), "returns": np.array([0.1, 0.2, 9.0])}
    batch = with_signals(batch, **signals)
    # Row 0: sequences 0 and 1; row 1: sequence 2, which has nothing to train on.
    np.testing.assert_allclose(batch.advantages, [[0, 0, 2, 2, 0, 0, -1], [0] * 7])
    np.testing.assert_allclose(batch.returns, [[0, 0, 0.1, 0.1, 0, 0, 0.2], [0] * 7], rtol=1e-6)
    assert batch.advantages.dtype == batch.returns.dtype == np.float32


def test_masks_go_by_position_not_by_token():
    # Token 0 pads the row and also ends the completion.
    batch = pack([make_sequence(0, [5, 0])], tokens_per_row=8, rows_per_micro_batch=1)
    np.testing.assert_array_equal(batch.loss_mask[0], [0, 0, 1, 1, 0, 0, 0, 0])


def test_a_rollout_longer_than_a_row_names_the_setting():
    with pytest.raises(ValueError, match=r"trainer\.tokens_per_row \(4\).*prompt 9 .*5 tokens"):
        pack([make_sequence(9, [1, 2, 3])], tokens_per_row=4, rows_per_micro_batch=1)


def test_nothing_to_pack_and_an_empty_prompt_are_errors():
    with pytest.raises(ValueError, match="at least one"):
        pack([], tokens_per_row=4, rows_per_micro_batch=1)
    with pytest.raises(ValueError, match="prompt 9 has no tokens"):
        pack([make_sequence(9, [1], num_prompt_tokens=0)], tokens_per_row=4, rows_per_micro_batch=1)


def test_a_padded_size_is_a_power_of_two_of_units():
    assert [padded_size(n, 1) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]
    assert [padded_size(n, 3) for n in (1, 3, 4, 6, 7, 12, 13)] == [3, 3, 6, 6, 12, 12, 24]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_rollout_lies_in_one_row_without_overlap(lengths):
    placements = plan_rows(lengths, tokens_per_row=20)
    rows: dict[int, list] = {}
    for placement, length in zip(placements, lengths, strict=True):
        rows.setdefault(placement.row, []).append((placement.start, placement.segment, length))
    assert sorted(rows) == list(range(len(rows)))
    totals = []
    for members in rows.values():
        end = 0
        for number, (start, segment, length) in enumerate(sorted(members), start=1):
            assert (start, segment) == (end, number)
            end += length
        assert end <= 20
        totals.append(end)
    # No row fits into another one, which first-fit guarantees.
    assert sum(sorted(totals)[:2]) > 20 or len(totals) == 1
    assert placements == plan_rows(lengths, tokens_per_row=20)

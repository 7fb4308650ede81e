import dataclasses

import numpy as np
import pytest

from pipeline_rl_jax.trainer.minibatches import split_updates
from tests.fakes.tiny_training import tiny_batch, tiny_settings


def updates_of(batch, *, epochs=1, minibatches=1, version=0):
    settings = tiny_settings(trainer={"epochs": epochs, "minibatches": minibatches}).trainer
    return list(split_updates(batch, settings, seed=7, version=version))


def completions_of(batch) -> list[tuple]:
    """Token ids of every sequence, in the order of its numbers."""
    index = np.asarray(batch.sequence_index)
    return [
        tuple(batch.token_ids[index == number].tolist())
        for number in range(int(batch.num_sequences))
    ]


def test_one_part_is_the_batch_itself():
    batch = tiny_batch()
    assert updates_of(batch) == [batch]
    assert updates_of(batch, epochs=3) == [batch] * 3


@pytest.mark.parametrize("minibatches", [2, 5, 24])
def test_an_epoch_holds_every_rollout_once_in_parts_of_equal_size(minibatches):
    batch = tiny_batch()  # 24 rollouts
    parts = updates_of(batch, minibatches=minibatches)
    sizes = [int(part.num_sequences) for part in parts]
    assert len(parts) == minibatches
    assert sum(sizes) == 24
    assert max(sizes) - min(sizes) <= 1
    together = [completion for part in parts for completion in completions_of(part)]
    assert sorted(together) == sorted(completions_of(batch))
    assert all(part.token_ids.shape[0] % 4 == 0 for part in parts)  # rows_per_micro_batch


def test_fewer_rollouts_than_parts_make_fewer_parts():
    batch = tiny_batch(1, padded_rows=4)  # three rollouts
    assert [int(part.num_sequences) for part in updates_of(batch, minibatches=8)] == [1, 1, 1]


def test_every_pass_and_every_version_draws_anew_and_the_same_again():
    batch = tiny_batch()

    def order(**changes):
        parts = updates_of(batch, minibatches=2, **changes)
        return [completions_of(part) for part in parts]

    first, second = order(epochs=2)[:2], order(epochs=2)[2:]
    assert first != second
    assert order() == order() == first
    assert order(version=1) != first


def test_all_arrays_of_a_token_go_with_it():
    batch = tiny_batch()
    numbered = np.arange(batch.token_ids.size, dtype=np.float32).reshape(batch.token_ids.shape)
    mask = np.asarray(batch.loss_mask)
    numbered = np.where(mask, numbered + 1, 0)
    batch = dataclasses.replace(
        batch, advantages=numbered, returns=-numbered, values=2 * numbered, truncated=mask
    )
    for part in updates_of(batch, minibatches=3):
        kept = np.asarray(part.loss_mask)
        places = part.advantages[kept].astype(int) - 1
        np.testing.assert_array_equal(batch.token_ids.ravel()[places], part.token_ids[kept])
        np.testing.assert_array_equal(part.returns, -part.advantages)
        np.testing.assert_array_equal(part.values, 2 * part.advantages)
        np.testing.assert_array_equal(part.truncated, kept)
        positions = batch.positions.ravel()[places]
        np.testing.assert_array_equal(positions, part.positions[kept])
        assert (part.weight_versions[~kept] == -1).all()
        assert (part.sequence_index[part.segment_ids == 0] == -1).all()

import jax
import numpy as np
import pytest

from pipeline_rl_jax.trainer.microbatches import place_batch
from tests.fakes.tiny_training import tiny_batch, tiny_meshes


def test_rows_stay_in_order_and_each_micro_batch_is_split_over_devices():
    mesh = tiny_meshes(trainer_devices=(0, 1), trainer=(1, 2, 1)).trainer
    batch = tiny_batch(8)
    with jax.transfer_guard("disallow"):
        placed = place_batch(batch, rows_per_micro_batch=4, mesh=mesh)
    assert placed.token_ids.shape == (2, 4, 32)
    np.testing.assert_array_equal(placed.token_ids.reshape(8, 32), batch.token_ids)
    np.testing.assert_array_equal(placed.loss_mask.reshape(8, 32), batch.loss_mask)
    first = placed.token_ids.addressable_shards[0]
    np.testing.assert_array_equal(first.data, batch.token_ids.reshape(2, 4, 32)[:, :2])
    assert placed.num_rows.shape == ()
    assert int(placed.num_rows) == 8


def test_a_partial_micro_batch_is_refused():
    mesh = tiny_meshes().trainer
    with pytest.raises(ValueError, match=r"6 rows is no multiple of trainer.rows_per_micro_batch"):
        place_batch(tiny_batch(6), rows_per_micro_batch=4, mesh=mesh)

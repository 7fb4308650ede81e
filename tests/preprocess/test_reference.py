"""The reference scores as the trainer does, whatever the mesh and the number of rows."""

import contextlib
import dataclasses
import threading

import jax
import numpy as np
import pytest

from pipeline_rl_jax.models.loading import build_model, random_params
from pipeline_rl_jax.models.packed_forward import TokenRows, score_rows
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.preprocess.reference import ReferencePolicy
from tests.fakes.quick_compilation import quick_compilation
from tests.fakes.tiny_training import TINY, tiny_batch, tiny_meshes, tiny_settings

SETTINGS = tiny_settings(generation={"temperature": 0.7})


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation(tmp_path_factory):
    with quick_compilation(tmp_path_factory.getbasetemp() / "compiled"):
        yield


def make_reference(mesh, *, seed=0, order=None) -> ReferencePolicy:
    params = random_params(TINY, seed=seed, dtype="float32", shardings=param_shardings(TINY, mesh))
    return ReferencePolicy(
        TINY, params, settings=SETTINGS, mesh=mesh, order=order or contextlib.nullcontext()
    )


def test_equal_weights_give_the_trainers_logprobs_on_any_mesh():
    batch, mesh = tiny_batch(6, padded_rows=16), tiny_meshes().trainer
    params = random_params(TINY, seed=0, dtype="float32", shardings=param_shardings(TINY, mesh))
    expected = jax.jit(
        lambda params: (
            score_rows(
                build_model(TINY, SETTINGS.model),
                params,
                TokenRows.of(batch),
                settings=SETTINGS,
                mesh=mesh,
            ).logprobs
        )
    )(params)
    four = tiny_meshes(trainer_devices=(0, 1, 2, 3), trainer=(1, 2, 2)).trainer
    for each in (mesh, four):
        actual = make_reference(each).logprobs(batch)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        assert not actual[~batch.loss_mask].any()
    assert np.abs(make_reference(mesh, seed=1).logprobs(batch) - expected).max() > 0.1


def test_offloaded_weights_give_the_same_logprobs():
    batch, mesh = tiny_batch(6, padded_rows=16), tiny_meshes().trainer
    params = random_params(TINY, seed=0, dtype="float32", shardings=param_shardings(TINY, mesh))
    expected = make_reference(mesh).logprobs(batch)
    offloaded = ReferencePolicy(
        TINY,
        params,
        settings=SETTINGS,
        mesh=mesh,
        order=contextlib.nullcontext(),
        offloaded=True,
    )
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    for _ in range(2):
        np.testing.assert_array_equal(offloaded.logprobs(batch), expected)


def test_every_dispatch_is_in_order_and_padding_rows_are_left_out():
    class Order(contextlib.AbstractContextManager):
        def __init__(self):
            self.lock, self.num_taken = threading.Lock(), 0

        def __enter__(self):
            assert self.lock.acquire(blocking=False)
            self.num_taken += 1

        def __exit__(self, *error):
            self.lock.release()

    order = Order()
    reference = make_reference(tiny_meshes().trainer, order=order)
    batch = tiny_batch(6, padded_rows=16)
    logprobs = reference.logprobs(batch)
    assert order.num_taken == 2  # four rows each; the third and fourth micro-batch are empty
    garbage = np.where(np.arange(16)[:, None] < 6, batch.token_ids, 1)
    np.testing.assert_array_equal(
        reference.logprobs(dataclasses.replace(batch, token_ids=garbage)), logprobs
    )

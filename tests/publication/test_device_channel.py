import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.meshes import Meshes
from pipeline_rl_jax.models.loading import random_params
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.models.transformer import abstract_params
from pipeline_rl_jax.publication.device_channel import DeviceChannel
from pipeline_rl_jax.publication.weight_store import WeightStore
from tests.fakes.tiny_training import TINY, tiny_batch, tiny_meshes, tiny_settings, tiny_trainer

SAME_DEVICE = tiny_meshes(generation_devices=(0,))
TWO_DEVICES = tiny_meshes()
FOUR_AND_FOUR = tiny_meshes(
    trainer_devices=(0, 1, 2, 3),
    generation_devices=(4, 5, 6, 7),
    trainer=(1, 2, 2),
    generation=(2, 2),
)
FULLY_SHARDED_TO_ONE = tiny_meshes(trainer_devices=(0, 1, 2, 3), trainer=(1, 4, 1))
DEADLINE_SECONDS = 60.0


def placed(mesh: jax.sharding.Mesh, dtype: str) -> dict:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
        abstract_params(TINY),
        param_shardings(TINY, mesh),
    )


@contextlib.contextmanager
def open_channel(
    meshes: Meshes, *, dtype: str = "float32", prepare: Callable | None = None
) -> Iterator[tuple[DeviceChannel, WeightStore]]:
    store = WeightStore(prepare=prepare)
    target = placed(meshes.generation, dtype)
    channel = DeviceChannel(store, source=placed(meshes.trainer, "float32"), target=target)
    try:
        yield channel, store
    finally:
        channel.close()


def make_params(meshes: Meshes, *, seed: int = 0) -> dict:
    shardings = param_shardings(TINY, meshes.trainer)
    return random_params(TINY, seed=seed, dtype="float32", shardings=shardings)


def checksums(params: dict) -> list[int]:
    """Of the bits of every tensor, with the place of each number."""
    sums = []
    for leaf in jax.tree.leaves(jax.device_get(params)):
        bits = np.ascontiguousarray(leaf).view(f"u{leaf.dtype.itemsize}").ravel().astype(np.uint64)
        sums.append(int(np.sum(bits * np.arange(1, bits.size + 1, dtype=np.uint64))))
    return sums


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "meshes", [SAME_DEVICE, TWO_DEVICES, FOUR_AND_FOUR, FULLY_SHARDED_TO_ONE], ids=str
)
def test_every_bit_arrives(meshes, dtype):
    params = make_params(meshes)
    expected = checksums(jax.tree.map(lambda x: jnp.asarray(np.asarray(x), dtype), params))
    with open_channel(meshes, dtype=dtype) as (channel, store):
        channel.publish(3, params)
        weights = store.wait_for(3, deadline_seconds=DEADLINE_SECONDS)
    assert weights.version == 3
    assert checksums(weights.params) == expected
    wanted = placed(meshes.generation, dtype)
    for leaf, like in zip(jax.tree.leaves(weights.params), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == like.dtype
        assert leaf.sharding == like.sharding


@pytest.mark.parametrize("meshes", [SAME_DEVICE, TWO_DEVICES], ids=["same", "two"])
def test_published_weights_outlive_the_steps_that_give_up_their_source(meshes):
    trainer = tiny_trainer(tiny_settings(), meshes)
    with open_channel(meshes) as (channel, store):
        seen = {}
        for version in range(4):
            expected = checksums(trainer.state.params)
            channel.publish(version, trainer.state.params)
            trainer.train(tiny_batch())  # donates what was published
            weights = store.wait_for(version, deadline_seconds=DEADLINE_SECONDS)
            seen[version] = checksums(weights.params)
            del weights
            assert seen[version] == expected
            assert seen[version] != seen.get(version - 1)


@jax.jit
def slowly(params: dict) -> dict:
    """The same params, after a second or so of matrix products."""
    matrix = jnp.full((400, 400), 1 / 400) + 0 * params["final_norm"][0]
    zero = 0 * jax.lax.fori_loop(0, 800, lambda _, x: x @ matrix, matrix)[0, 0]
    return params | {"final_norm": params["final_norm"] + zero}


def test_publishing_does_not_wait_and_an_incomplete_version_is_invisible():
    params = make_params(TWO_DEVICES)
    with open_channel(TWO_DEVICES) as (channel, store):
        channel.publish(1, params)
        store.wait_for(1, deadline_seconds=DEADLINE_SECONDS)
        jax.block_until_ready(slowly(params))  # compiled
        slow = slowly(params)
        channel.publish(2, slow)
        published = time.monotonic()
        visible = store.latest().version
        assert not slow["final_norm"].is_ready()  # all of the above came before it was
        assert visible == 1
        assert not store.arrival(2).done()
        weights = store.wait_for(2, deadline_seconds=DEADLINE_SECONDS)
        assert time.monotonic() - published > 0.05
        assert checksums(weights.params) == checksums(params)
        assert channel.take_metrics()["publication/transfer_seconds"] > 0.05


def test_at_most_two_versions_live_and_only_the_newest_waits():
    params = make_params(TWO_DEVICES)
    with open_channel(TWO_DEVICES) as (channel, store):
        channel.publish(0, params)
        reader = store.wait_for(0, deadline_seconds=DEADLINE_SECONDS)
        channel.publish(1, params)  # beside the one that is being read
        store.arrival(1).result(DEADLINE_SECONDS)
        for version in (2, 3, 4):
            channel.publish(version, params)
        time.sleep(0.1)
        assert reader.version == 0
        assert not store.has_room()
        assert not store.arrival(2).done()
        first_array = weakref.ref(reader.params["embedding"])
        reader = store.latest()
        gc.collect()
        assert first_array() is None
        assert reader.version == 1
        assert store.wait_for(2, deadline_seconds=DEADLINE_SECONDS).version == 4
        assert channel.take_metrics()["publication/superseded_versions"] == 2.0


def test_a_reader_that_never_lets_go_does_not_stall_the_run(monkeypatch, caplog):
    monkeypatch.setattr("pipeline_rl_jax.publication.device_channel._PATIENCE_SECONDS", 0.05)
    params = make_params(TWO_DEVICES)
    with open_channel(TWO_DEVICES) as (channel, store):
        held = []
        for version in range(3):
            channel.publish(version, params)
            held.append(store.wait_for(version, deadline_seconds=DEADLINE_SECONDS))
    assert [weights.version for weights in held] == [0, 1, 2]
    assert "a third set of weights comes in" in caplog.text


def test_an_update_that_does_not_fit_changes_nothing():
    params = make_params(TWO_DEVICES)
    with open_channel(TWO_DEVICES) as (channel, store):
        channel.publish(0, params)
        before = checksums(store.wait_for(0, deadline_seconds=DEADLINE_SECONDS).params)
        wrong = params | {"final_norm": jnp.ones(33)}
        with pytest.raises(ValueError, match=r"final_norm is float32\[33\], not float32\[32\]"):
            channel.publish(1, wrong)
        assert store.latest().version == 0
        assert checksums(store.latest().params) == before
        channel.publish(1, params)
        assert store.wait_for(1, deadline_seconds=DEADLINE_SECONDS).version == 1


def test_shards_go_from_device_to_device_and_not_through_the_host():
    params = jax.block_until_ready(make_params(FOUR_AND_FOUR))
    with open_channel(FOUR_AND_FOUR) as (channel, _):
        staged = channel._cast(params)
    wanted = placed(FOUR_AND_FOUR.generation, "float32")
    for leaf, like in zip(jax.tree.leaves(staged), jax.tree.leaves(wanted), strict=True):
        have = {str(shard.index) for shard in leaf.addressable_shards}
        need = {str(index) for index in like.sharding.devices_indices_map(like.shape).values()}
        assert need <= have


def test_generation_may_be_split_in_more_ways_than_the_trainer_has_devices():
    meshes = tiny_meshes(generation_devices=(4, 5, 6, 7), generation=(2, 2))
    params = make_params(meshes)
    with open_channel(meshes) as (channel, store):
        channel.publish(0, params)
        weights = store.wait_for(0, deadline_seconds=DEADLINE_SECONDS)
    assert checksums(weights.params) == checksums(params)


def test_the_engine_gets_its_layout():
    def unstack(params: dict) -> list:
        return [params["layers"]["gate"][layer] for layer in range(TINY.num_layers)]

    params = make_params(TWO_DEVICES)
    with open_channel(TWO_DEVICES, prepare=jax.jit(unstack)) as (channel, store):
        channel.publish(0, params)
        layers = store.wait_for(0, deadline_seconds=DEADLINE_SECONDS).params
        metrics = channel.take_metrics()
    np.testing.assert_array_equal(layers[1], params["layers"]["gate"][1])
    assert layers[1].devices() == set(TWO_DEVICES.generation.devices.ravel())
    assert metrics["publication/swap_seconds"] > 0
    assert metrics["publication/transfer_seconds"] >= metrics["publication/dispatch_seconds"] > 0


def test_what_goes_wrong_on_the_way_is_raised_where_weights_are_looked_up():
    params = make_params(TWO_DEVICES)
    with open_channel(TWO_DEVICES) as (channel, store):
        channel.publish(5, params)
        store.wait_for(5, deadline_seconds=DEADLINE_SECONDS)
        channel.publish(4, params)
        with pytest.raises(ValueError, match="version 4 follows version 5"):
            store.arrival(6).result(DEADLINE_SECONDS)
        with pytest.raises(RuntimeError, match="could not be published"):
            store.latest()


def test_a_closed_channel_leaves_no_thread_and_the_weights_readable():
    params = make_params(TWO_DEVICES)
    with open_channel(TWO_DEVICES) as (channel, store):
        channel.publish(0, params)
        store.wait_for(0, deadline_seconds=DEADLINE_SECONDS)
    assert "publication" not in {thread.name for thread in threading.enumerate()}
    assert store.latest().version == 0

import asyncio
import gc
import threading

import jax.numpy as jnp
import pytest

from pipeline_rl_jax.publication.weight_store import WeightStore


def params(value: float) -> dict:
    return {"gate": jnp.full(3, value)}


def test_latest_is_the_newest_published():
    store = WeightStore()
    store.publish(0, params(0.0))
    store.publish(4, params(4.0))
    weights = store.latest()
    assert weights.version == 4
    assert weights.params["gate"].tolist() == [4.0, 4.0, 4.0]
    assert store.latest() is weights


def test_nothing_published_is_an_error_and_not_random_weights():
    with pytest.raises(RuntimeError, match="no weights have been published yet"):
        WeightStore().latest()


@pytest.mark.parametrize("version", [3, 2])
def test_versions_must_grow(version):
    store = WeightStore()
    store.publish(3, params(3.0))
    with pytest.raises(ValueError, match=f"weight version {version} follows version 3"):
        store.publish(version, params(9.0))
    assert store.latest().params["gate"][0] == 3.0


def test_wait_for_returns_what_was_waited_for_or_newer():
    store = WeightStore()
    store.publish(1, params(1.0))
    assert store.wait_for(1, deadline_seconds=0).version == 1
    timer = threading.Timer(0.05, store.publish, args=(5, params(5.0)))
    timer.start()
    assert store.wait_for(3, deadline_seconds=30).version == 5
    timer.join()


def test_a_wait_has_a_deadline_that_names_whom_it_waited_for():
    store = WeightStore()
    with pytest.raises(TimeoutError, match=r"0.01 s for the trainer .* version 2; .* is none"):
        store.wait_for(2, deadline_seconds=0.01)
    store.publish(1, params(1.0))
    with pytest.raises(TimeoutError, match="the newest is version 1"):
        store.wait_for(2, deadline_seconds=0.01)


def test_coroutines_wait_without_a_thread_and_may_give_up():
    store = WeightStore()

    async def main() -> None:
        given_up = asyncio.wrap_future(store.arrival(1))
        given_up.cancel()
        waiting = asyncio.wrap_future(store.arrival(1))
        await asyncio.sleep(0)
        threading.Timer(0.02, store.publish, args=(1, params(1.0))).start()
        await asyncio.wait_for(waiting, 30)

    asyncio.run(main())
    assert store.latest().version == 1


def test_failure_reaches_lookups_and_waits_begun_before_and_after():
    store = WeightStore()
    store.publish(0, params(0.0))
    early = store.arrival(1)
    store.fail(MemoryError("out of device memory"))
    for future in (early, store.arrival(0)):
        with pytest.raises(MemoryError, match="out of device memory"):
            future.result(timeout=1)
    with pytest.raises(RuntimeError, match="could not be published") as caught:
        store.latest()
    assert isinstance(caught.value.__cause__, MemoryError)


def test_engine_layout_is_made_once_a_version_by_the_first_who_looks():
    calls = []

    def prepare(tree: dict) -> dict:
        calls.append(threading.current_thread())
        return {"fused": tree["gate"] * 2}

    store = WeightStore(prepare=prepare)
    store.publish(1, params(1.0))
    assert calls == []
    assert store.latest().params["fused"].tolist() == [2.0, 2.0, 2.0]
    assert store.latest().params["fused"] is store.latest().params["fused"]
    assert calls == [threading.main_thread()]
    store.publish(2, params(2.0))
    assert store.latest().params["fused"][0] == 4.0
    assert len(calls) == 2
    assert store.take_swap_seconds() > 0
    assert store.take_swap_seconds() == 0


def test_there_is_room_once_only_the_visible_version_is_in_use():
    store = WeightStore()
    assert store.has_room()
    store.publish(1, params(1.0))
    reader = store.latest()
    assert store.has_room()
    store.publish(2, params(2.0))
    gc.collect()
    assert not store.has_room()
    reader = store.latest()
    assert store.has_room()
    assert reader.version == 2


def test_a_reader_may_hold_params_alone():
    store = WeightStore()
    store.publish(1, params(1.0))
    held = store.latest().params
    store.publish(2, params(2.0))
    gc.collect()
    assert not store.has_room()
    del held
    assert store.has_room()

import asyncio

import pytest

from pipeline_rl_jax.rollouts.stream import MemoryStream
from pipeline_rl_jax.rollouts.waits import WaitedTooLong, Waits
from tests.fakes.virtual_clock import run_virtual


def make_stream(deadline_seconds: float = 100.0, **kwargs) -> MemoryStream:
    return MemoryStream(
        Waits(deadline_seconds), producer="generation", consumer="trainer", **kwargs
    )


def at_least(count: int):
    return lambda items: items[:count] if len(items) >= count else "rollouts"


def test_items_come_oldest_first_whatever_the_order_of_arrival():
    async def main():
        stream = make_stream(key=lambda item: item)
        for item in (5, 1, 4, 2):
            stream.put(item)
        return await stream.take(at_least(3)), stream.drain()

    assert run_virtual(main()) == ([1, 2, 4], [5])


def test_without_a_key_they_come_as_they_went():
    async def main():
        stream = make_stream()
        for item in (5, 1, 4):
            stream.put(item)
        return [await stream.get(whom="rollouts") for _ in range(3)]

    assert run_virtual(main()) == [5, 1, 4]


def test_take_waits_until_enough_are_there():
    async def main():
        stream = make_stream()

        async def produce():
            for item in range(3):
                await asyncio.sleep(1)
                stream.put(item)

        producer = asyncio.create_task(produce())
        taken = await stream.take(at_least(3))
        await producer
        return taken, asyncio.get_running_loop().time()

    assert run_virtual(main()) == ([0, 1, 2], 3.0)


def test_after_close_what_is_there_can_be_taken_and_then_comes_the_end():
    async def main():
        stream = make_stream()
        for item in range(3):
            stream.put(item)
        stream.close()
        taken = [await stream.take(at_least(2)), await stream.take(at_least(2))]
        return taken, stream.drain()

    assert run_virtual(main()) == ([[0, 1], None], [2])


@pytest.mark.parametrize("end", ["close", "abort"])
def test_the_end_releases_a_consumer_that_waits(end):
    async def main():
        stream = make_stream()
        asyncio.get_running_loop().call_later(5, getattr(stream, end))
        return await stream.get(whom="rollouts"), asyncio.get_running_loop().time()

    assert run_virtual(main()) == (None, 5.0)


def test_abort_leaves_the_rest_to_drain_and_a_late_put_is_not_lost():
    async def main():
        stream = make_stream()
        stream.put(1)
        stream.abort()
        taken = await stream.get(whom="rollouts")
        stream.put(2)
        return taken, stream.drain()

    assert run_virtual(main()) == (None, [1, 2])


def test_put_after_close_is_an_error_that_names_the_producer():
    async def main():
        stream = make_stream()
        stream.close()
        stream.put(1)

    with pytest.raises(RuntimeError, match="generation put an item after it closed its stream"):
        run_virtual(main())


def test_the_deadline_names_whom_the_choice_was_missing():
    async def main():
        stream = make_stream(10.0)
        await stream.take(lambda items: "stragglers (max_lag)")

    with pytest.raises(WaitedTooLong, match=r"trainer waited 10 s for stragglers \(max_lag\)"):
        run_virtual(main())


def test_the_deadline_is_on_silence_not_on_the_whole_wait():
    async def main():
        stream = make_stream(10.0)
        for item in range(4):
            asyncio.get_running_loop().call_later(8.0 * (item + 1), stream.put, item)
        return await stream.take(at_least(4)), asyncio.get_running_loop().time()

    assert run_virtual(main()) == ([0, 1, 2, 3], 32.0)


def test_room_is_waited_for_and_granted_by_a_take():
    async def main():
        stream = make_stream()
        stream.put(0)
        assert await stream.wait_for_room(2, whom="trainer")

        async def consume():
            await asyncio.sleep(3)
            await stream.get(whom="rollouts")

        consumer = asyncio.create_task(consume())
        granted = await stream.wait_for_room(1, whom="trainer")
        await consumer
        return granted, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (True, 3.0)


def test_no_room_once_aborted():
    async def main():
        stream = make_stream()
        stream.put(0)
        asyncio.get_running_loop().call_later(2, stream.abort)
        return await stream.wait_for_room(1, whom="trainer")

    assert run_virtual(main()) is False


def test_wake_asks_the_choice_again():
    async def main():
        stream, allowed = make_stream(), []
        stream.put(0)

        def allow():
            allowed.append(True)
            stream.wake()

        asyncio.get_running_loop().call_later(4, allow)
        return await stream.take(lambda items: items if allowed else "permission")

    assert run_virtual(main()) == [0]


def test_a_consumer_and_a_waiting_producer_do_not_take_each_others_wake():
    async def main():
        stream, got = make_stream(), []

        async def produce():
            for item in range(200):
                await stream.wait_for_room(1, whom="trainer")
                stream.put(item)
            stream.close()

        async def consume():
            while (item := await stream.get(whom="rollouts")) is not None:
                got.append(item)

        await asyncio.gather(produce(), consume())
        return got

    assert run_virtual(main()) == list(range(200))

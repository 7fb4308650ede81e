import asyncio

import pytest

from pipeline_rl_jax.rollouts.waits import WaitedTooLong, Waits
from tests.fakes.virtual_clock import run_virtual


def test_seconds_are_counted_by_pair():
    async def main():
        waits = Waits(100.0)
        await waits.within(asyncio.sleep(3), who="trainer", whom="rollouts")
        await waits.within(asyncio.sleep(4), who="trainer", whom="rollouts")
        with waits.timing("generation", "trainer"):
            await asyncio.sleep(5)
        waits.add("generation", "trainer", 0.5)
        return waits

    waits = run_virtual(main())
    assert waits.seconds == {("trainer", "rollouts"): 7.0, ("generation", "trainer"): 5.5}


def test_take_seconds_gives_what_is_new():
    async def main():
        waits = Waits(100.0)
        await waits.within(asyncio.sleep(3), who="trainer", whom="rollouts")
        first = waits.take_seconds()
        await waits.within(asyncio.sleep(2), who="generation", whom="trainer")
        return first, waits.take_seconds(), waits.take_seconds()

    first, second, third = run_virtual(main())
    assert first == {("trainer", "rollouts"): 3.0}
    assert second == {("generation", "trainer"): 2.0}
    assert third == {}


def test_an_unfinished_wait_is_counted_up_to_now_and_not_twice():
    async def main():
        waits = Waits(100.0)
        wait = asyncio.create_task(waits.within(asyncio.sleep(10), who="trainer", whom="rollouts"))
        await asyncio.sleep(4)
        first = waits.take_seconds()
        await wait
        return first, waits.take_seconds(), waits.seconds

    pair = ("trainer", "rollouts")
    assert run_virtual(main()) == ({pair: 4.0}, {pair: 6.0}, {pair: 10.0})


def test_a_call_of_a_stage_is_no_wait():
    async def main():
        waits = Waits(100.0)
        await waits.working(asyncio.sleep(3), who="generation")
        return waits.seconds

    assert run_virtual(main()) == {}


def test_the_deadline_names_both_and_what_goes_on_meanwhile():
    async def main():
        waits = Waits(10.0)
        first = asyncio.create_task(waits.within(asyncio.sleep(99), who="trainer", whom="rollouts"))
        await asyncio.sleep(1)
        second = asyncio.create_task(waits.working(asyncio.sleep(99), who="generation"))
        await asyncio.sleep(3)
        others = [
            asyncio.create_task(waits.working(asyncio.sleep(99), who="scoring")) for _ in range(3)
        ]
        return await asyncio.gather(first, second, *others, return_exceptions=True)

    first, second, *_, last = run_virtual(main())
    assert isinstance(first, WaitedTooLong)
    assert str(first) == (
        "trainer waited 10 s for rollouts (schedule.deadline_seconds); meanwhile: "
        "generation is at work for 9.0 s; scoring is at work for 6.0 s (3 times)"
    )
    assert str(second).startswith("generation was at work for 10 s in one call")
    assert str(last).endswith("meanwhile: nothing else went on")


def test_a_time_out_of_the_stage_itself_stays_what_it_is():
    async def failing():
        raise TimeoutError("the reward server did not answer")

    async def main():
        await Waits(10.0).working(failing(), who="scoring")

    with pytest.raises(TimeoutError, match="the reward server did not answer") as caught:
        run_virtual(main())
    assert not isinstance(caught.value, WaitedTooLong)

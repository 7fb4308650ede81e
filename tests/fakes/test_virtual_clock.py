import asyncio
import time

import pytest

from tests.fakes.virtual_clock import VirtualDeadlock, run_virtual


def test_sleeps_end_in_order_and_cost_no_time():
    async def main():
        order = []

        async def sleeper(name: str, seconds: float):
            await asyncio.sleep(seconds)
            order.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(sleeper("late", 86_400.0), sleeper("early", 0.5))
        return order

    started = time.perf_counter()
    assert run_virtual(main()) == [("early", 0.5), ("late", 86_400.0)]
    assert time.perf_counter() - started < 5


def test_waiting_for_nothing_is_an_error_and_no_hang():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock):
        run_virtual(main())

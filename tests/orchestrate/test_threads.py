import asyncio
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from pipeline_rl_jax.orchestrate.failures import StageFailure
from pipeline_rl_jax.orchestrate.threads import StageThread
from tests.fakes.stages import SCHEDULES, FakeGeneration, FakeTraining, World, make_plan


def test_calls_run_in_order_in_one_thread_and_off_the_event_loop():
    async def main():
        thread, seen = StageThread("trainer"), []

        def work(index: int, *, seconds: float) -> int:
            time.sleep(seconds)
            seen.append((index, threading.current_thread().name))
            return index * index

        calls = [thread.run(work, index, seconds=0.03 - 0.01 * index) for index in range(3)]
        return await asyncio.gather(*calls), seen

    results, seen = asyncio.run(main())
    assert results == [0, 1, 4]
    assert seen == [(0, "trainer"), (1, "trainer"), (2, "trainer")]


def test_two_stages_block_at_the_same_time():
    async def main():
        meet = threading.Barrier(2, timeout=20)
        await asyncio.gather(
            StageThread("trainer").run(meet.wait), StageThread("generation").run(meet.wait)
        )

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError("bad shape"), SystemExit(3)])
def test_an_error_is_raised_where_it_is_awaited(error):
    def work():
        raise error

    async def main():
        thread = StageThread("trainer")
        with pytest.raises(type(error)) as caught:
            await thread.run(work)
        return caught.value, await thread.run(lambda: "still there")

    assert asyncio.run(main()) == (error, "still there")


def test_the_end_of_an_iterator_does_not_hang_whoever_awaits():
    async def main():
        await asyncio.wait_for(StageThread("data").run(next, iter(())), timeout=20)

    with pytest.raises(RuntimeError, match="data raised StopIteration"):
        asyncio.run(main())


def test_a_cancelled_call_that_has_not_begun_is_skipped():
    async def main():
        thread, release, seen = StageThread("trainer"), threading.Event(), []
        first = asyncio.create_task(thread.run(release.wait))
        await asyncio.sleep(0)
        second = asyncio.create_task(thread.run(seen.append, "second"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        release.set()
        await first
        await thread.run(seen.append, "third")
        return seen

    assert asyncio.run(main()) == ["third"]


def test_closed_the_thread_ends_after_what_was_asked_of_it():
    async def main():
        thread, seen = StageThread("trainer"), []
        call = asyncio.create_task(thread.run(seen.append, "last"))
        await asyncio.sleep(0)
        thread.close()
        await call
        return seen

    before = threading.active_count()
    assert asyncio.run(main()) == ["last"]
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_call_that_never_returns_keeps_no_interpreter_from_ending():
    program = """
        import asyncio, threading
        from pipeline_rl_jax.orchestrate.threads import StageThread

        async def main():
            async with asyncio.timeout(0.2):
                await StageThread("generation").run(threading.Event().wait)

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("TimeoutError")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_whose_device_hangs_ends_at_the_deadline(name):
    """On the real clock: the event loop closes although the thread never comes back."""
    release = threading.Event()

    class Hanging(FakeGeneration):
        thread = StageThread("generation")

        async def advance(self, weights):
            if weights.version >= 2:
                await self.thread.run(release.wait)
            return await super().advance(weights)

    world = World(
        generation=Hanging(seconds=lambda chunk: 0.001),
        training=FakeTraining(seconds=lambda version: 0.001),
        publication_seconds=0.001,
    )
    world.scoring.seconds = lambda completion: 0.0
    plan = make_plan(num_steps=100, deadline_seconds=1.5)
    started = time.monotonic()
    with pytest.raises(StageFailure, match=r"generation (was|is) at work"):
        asyncio.run(SCHEDULES[name].run(world.stages, plan))
    assert time.monotonic() - started < 20
    release.set()

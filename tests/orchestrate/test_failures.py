import asyncio

import pytest

from pipeline_rl_jax.orchestrate.failures import StageFailure, call, naming, one_failure
from pipeline_rl_jax.rollouts.waits import WaitedTooLong, Waits
from tests.fakes.virtual_clock import run_virtual


async def fail(error: BaseException, after_seconds: float = 0.0) -> None:
    await asyncio.sleep(after_seconds)
    raise error


def run_together(*coroutines) -> None:
    async def main():
        async with one_failure(), asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)

    run_virtual(main())


def test_an_error_gets_the_name_of_the_innermost_stage():
    with pytest.raises(StageFailure, match="scoring: KeyError: 'reward'") as caught:  # noqa: SIM117
        with naming("generation"), naming("scoring"):
            raise KeyError("reward")
    assert caught.value.stage == "scoring"
    assert isinstance(caught.value.cause, KeyError)
    assert caught.value.__cause__ is caught.value.cause


def test_cancellation_is_no_failure():
    with pytest.raises(asyncio.CancelledError), naming("generation"):
        raise asyncio.CancelledError


def test_a_call_that_hangs_is_a_failure_of_its_stage():
    async def main():
        await call(Waits(60.0), "training", asyncio.Event().wait())

    with pytest.raises(StageFailure, match="training was at work for 60 s in one call") as caught:
        run_virtual(main())
    assert isinstance(caught.value.cause, WaitedTooLong)


def test_of_several_failures_one_is_raised_and_the_others_are_notes():
    first, second = (
        StageFailure("scoring", OSError("gone")),
        StageFailure("data", ValueError("bad")),
    )
    with pytest.raises(StageFailure) as caught:
        run_together(fail(first), fail(second))
    assert caught.value is first
    assert caught.value.__notes__ == ["also failed: data: ValueError: bad"]
    assert caught.value.__cause__ is first.cause


def test_an_error_explains_more_than_a_deadline():
    late = StageFailure("training", WaitedTooLong("trainer waited 9 s for rollouts"))
    real = StageFailure("generation", OSError("device lost"))
    with pytest.raises(StageFailure, match="device lost") as caught:
        run_together(fail(late), fail(real))
    assert caught.value is real


def test_an_error_awaited_by_another_task_is_told_once():
    error = StageFailure("generation", OSError("device lost"))

    async def main():
        async with one_failure(), asyncio.TaskGroup() as tasks:
            await tasks.create_task(fail(error, 1.0))

    with pytest.raises(StageFailure) as caught:
        run_virtual(main())
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def test_an_interrupt_passes_as_it_is():
    with pytest.raises(KeyboardInterrupt):
        run_together(fail(KeyboardInterrupt()))

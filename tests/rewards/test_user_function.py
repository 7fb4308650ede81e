import asyncio
import gc
import math
import time

import numpy as np
import pytest

from pipeline_rl_jax.rewards import user_function
from pipeline_rl_jax.rewards.score import Score
from pipeline_rl_jax.rewards.user_function import UserFunction, load_user_function
from tests.fakes import reward_functions
from tests.fakes.completions import make_text_completion


def _score(function, *, deadline_seconds: float = 10.0, text: str = "abc", num_tokens: int = 4):
    async def score():
        scorer = UserFunction(function, deadline_seconds=deadline_seconds)
        completion = make_text_completion(text, answer="1", num_tokens=num_tokens)
        scored = await scorer.score(completion)
        await scorer.close()
        return scored

    return asyncio.run(score())


def test_a_sync_and_an_async_function_score():
    assert _score(reward_functions.half_for_short).value == 0.5
    assert _score(reward_functions.half_for_short, num_tokens=20).value == 0.0
    assert _score(reward_functions.text_length).value == 3.0


def test_it_runs_off_the_thread_of_the_event_loop():
    assert _score(reward_functions.thread_is_main).value == 0.0


@pytest.mark.parametrize(
    ("function", "error", "detail"),
    [
        (reward_functions.unreachable_service, "user_function_error", "port 1 refused"),
        (reward_functions.times_out_itself, "user_function_error", "my own request"),
        (reward_functions.not_a_number, "user_function_not_a_number", "nan"),
        (reward_functions.no_number_at_all, "user_function_not_a_number", "'1.0'"),
        (lambda completion: None, "user_function_not_a_number", "None"),
        (lambda completion: math.inf, "user_function_not_a_number", "inf"),
        (lambda completion: np.array([1.0]), "user_function_not_a_number", "array([1.])"),
        (lambda completion: np.array([1.0, 2.0]), "user_function_not_a_number", "array([1., 2.])"),
        (lambda completion: 10**400, "user_function_not_a_number", "must return a finite number"),
        (lambda completion: exit(), "user_function_error", "SystemExit"),
        (reward_functions.exits_async, "user_function_error", "called sys.exit(3)"),
    ],
)
def test_what_is_no_score_is_an_error_and_not_zero(function, error, detail):
    score = _score(function)
    assert score.error == error
    assert detail in score.detail


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), np.float64(0.5)])
def test_numbers_of_numpy_are_numbers(number):
    assert _score(lambda completion: number) == Score(value=0.5)


def test_an_exit_in_a_coroutine_leaves_the_others_alone():
    calls = iter([SystemExit(3), 0.5])

    async def function(completion):
        call = next(calls)
        if isinstance(call, SystemExit):
            raise call
        return call

    async def score_twice():
        scorer = UserFunction(function, deadline_seconds=2.0)
        completion = make_text_completion("", answer="1")
        return [await scorer.score(completion) for _ in range(2)]

    first, second = asyncio.run(score_twice())
    assert (first.error, second) == ("user_function_error", Score(value=0.5))


@pytest.mark.parametrize(
    "function",
    [
        reward_functions.hangs_for_a_second,
        reward_functions.hangs_async,
        reward_functions.blocks_its_loop,
    ],
)
def test_a_function_that_hangs_is_given_up_at_the_deadline(function):
    start = time.monotonic()
    score = _score(function, deadline_seconds=0.1)
    assert score.error == "user_function_deadline"
    assert time.monotonic() - start < 0.9


def test_an_error_after_all_is_over_is_no_line_in_the_log(caplog):
    def function(completion):
        time.sleep(0.2)
        raise RuntimeError("too late")

    async def give_up():
        scorer = UserFunction(function, deadline_seconds=5.0)
        task = asyncio.create_task(scorer.score(make_text_completion("", answer="1")))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.3)

    gc.collect()  # what the tests before have left behind is none of this one's
    caplog.clear()
    asyncio.run(give_up())
    gc.collect()
    assert caplog.text == ""


def test_hung_threads_are_bounded_and_those_that_return_make_room(monkeypatch):
    monkeypatch.setattr(user_function, "_MAX_HUNG_CALLS", 2)

    async def score():
        scorer = UserFunction(reward_functions.hangs_for_a_second, deadline_seconds=0.05)
        completion = make_text_completion("", answer="1")
        errors = [(await scorer.score(completion)).error for _ in range(3)]
        await asyncio.sleep(1.2)
        return [*errors, (await scorer.score(completion)).error]

    assert asyncio.run(score()) == [
        "user_function_deadline",
        "user_function_deadline",
        "user_function_hung",
        "user_function_deadline",
    ]


def test_a_module_that_exits_at_import_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="a module that can be imported: SystemExit: 0"):
        load_user_function("exits_at_import:f")


def test_loading_by_import_path(tmp_path, monkeypatch):
    path = "tests.fakes.reward_functions:half_for_short"
    assert load_user_function(path) is reward_functions.half_for_short
    (tmp_path / "my_rewards_here.py").write_text("def f(completion):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)  # where the command is typed
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert load_user_function("my_rewards_here:f")(None) == 1.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "must be an import path"),
        ("module", "must be an import path"),
        ("module:", "must be an import path"),
        (":function", "must be an import path"),
        ("no_such_module_here:f", "No module named 'no_such_module_here'"),
        ("tests.fakes.reward_functions:absent", "which has no 'absent'"),
        ("tests.fakes.reward_functions:NOT_A_FUNCTION", "must name a function, not a int"),
        ("broken_rewards:f", "ZeroDivisionError"),
    ],
)
def test_a_path_of_no_use_is_one_clear_line(path, message, tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_user_function(path)
    assert str(caught.value).startswith("rewards.user_function (")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

"""A reward from the user's own function, named by import path.

Owns loading it and calling it safely: off the event loop, under a deadline, with whatever it raises
or returns turned into a score or an error. It does not own what the function does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import inspect
import math
import os
import reprlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from pipeline_rl_jax.records import Completion
from pipeline_rl_jax.rewards.score import Score

_MAX_HUNG_CALLS = 64  # threads cannot be stopped; beyond this many no more are started

RewardFunction = Callable[[Completion], Any]  # a number, or an awaitable of one


class UserFunction:
    """Scores a completion by `function(completion) -> finite number`, sync or async.

    A sync function runs in a thread of its own per call, so it may be called several times at once;
    coroutines share one event loop in a thread of their own. Raising, returning anything else than
    a finite number, or taking longer than `deadline_seconds` is an error, so the rollout is dropped
    and counted: a reward service that is down must not teach the policy.
    """

    def __init__(self, function: RewardFunction, *, deadline_seconds: float) -> None:
        self._function = function
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._num_hung_calls = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        if _is_async(function):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reward", daemon=True).start()

    async def score(self, completion: Completion) -> Score:
        if self._num_hung_calls >= _MAX_HUNG_CALLS:
            detail = f"{self._num_hung_calls} calls of the user's function never returned"
            return Score(value=0.0, error="user_function_hung", detail=detail)
        call = self._start_call(completion)
        # Not wait_for: a TimeoutError of the function's own is not our deadline.
        future = asyncio.wrap_future(call)
        # Looked at by whoever gives up waiting, too, or asyncio complains of it in the log.
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        done, _ = await asyncio.wait({future}, timeout=self._deadline_seconds)
        if not done:
            self._give_up(call)
            detail = f"no answer within rewards.deadline_seconds ({self._deadline_seconds:g})"
            return Score(value=0.0, error="user_function_deadline", detail=detail)
        return _score_of(done.pop())

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _start_call(self, completion: Completion) -> concurrent.futures.Future[Any]:
        if self._loop is not None:
            coroutine = _await_call(self._function, completion)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        call: concurrent.futures.Future[Any] = concurrent.futures.Future()
        call.set_running_or_notify_cancel()

        def run() -> None:
            try:
                call.set_result(self._function(completion))
            except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
                call.set_exception(error)

        threading.Thread(target=run, name="reward", daemon=True).start()
        return call

    def _give_up(self, call: concurrent.futures.Future[Any]) -> None:
        if call.cancel():  # a coroutine; a running thread refuses
            return
        with self._lock:
            self._num_hung_calls += 1
        call.add_done_callback(self._forget_hung_call)

    def _forget_hung_call(self, _: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._num_hung_calls -= 1


def load_user_function(path: str) -> RewardFunction:
    """The function at "package.module:function".

    Modules in the working directory are found too, after all installed ones. Raises ValueError in
    one line when there is no such module or function, or the module cannot be imported.
    """
    where = f"rewards.user_function ({path!r})"
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f'{where} must be an import path like "package.module:function"')
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{where} must name a module that can be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(
            f"{where} must name something in {module.__file__}, which has no {function_name!r}"
        )
    if not callable(function):
        raise ValueError(f"{where} must name a function, not a {type(function).__name__}")
    return function


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def _await_call(function: RewardFunction, completion: Completion) -> Any:
    try:
        return await function(completion)
    except SystemExit as error:  # it would end the thread in which all calls run
        raise RuntimeError(f"called sys.exit({error.code!r})") from error


def _score_of(call: asyncio.Future[Any]) -> Score:
    if call.cancelled():
        return Score(value=0.0, error="user_function_error", detail="cancelled itself")
    error = call.exception()
    if error is not None:
        detail = f"{type(error).__name__}: {error}"
        return Score(value=0.0, error="user_function_error", detail=detail)
    value = call.result()
    number = _as_number(value)
    if not math.isfinite(number):
        detail = f"returned {reprlib.repr(value)}; it must return a finite number"
        return Score(value=0.0, error="user_function_not_a_number", detail=detail)
    return Score(value=number)


def _as_number(value: Any) -> float:
    """NaN for what is none. Numbers of numpy and JAX are numbers, their arrays of one are not."""
    try:
        if not hasattr(type(value), "__float__") or getattr(value, "ndim", 0):
            return math.nan
        return float(value)
    except Exception:  # noqa: BLE001 - an object of the user's may raise anything
        return math.nan

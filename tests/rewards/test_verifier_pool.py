import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from pipeline_rl_jax.rewards import verifier_pool
from pipeline_rl_jax.rewards.verifier_pool import Outcome, VerifierPool, VerifierUnavailableError
from tests.fakes.worker_process import ask_in_this_process
from tests.rewards.conftest import DEADLINE_SECONDS

# Python's `re` needs longer than the age of the universe for this.
_ENDLESS_PATTERN, _ENDLESS_TEXT = r"^(a+)+$", "a" * 60 + "b"
_PATHOLOGICAL_ANSWER = "9^{9^{9^{9}}}"

needs_proc = pytest.mark.skipif(
    not pathlib.Path("/proc/self/task").exists(), reason="finds processes in /proc"
)


def _search_pool(num_workers: int = 1, deadline_seconds: float = 30.0) -> VerifierPool:
    """Without math-verify, so that it starts at once."""
    return VerifierPool(
        num_workers=num_workers, deadline_seconds=deadline_seconds, kinds={"search"}
    )


@pytest.fixture
def make_pool():
    pools = []

    def make(*arguments):
        pools.append(_search_pool(*arguments))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def _ask(pool: VerifierPool, kind="search", left="b", right="abc") -> Outcome:
    return asyncio.run(pool.ask(kind, left, right))


def _children(pid: int) -> list[int]:
    return [
        int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def _service_pid(pool: VerifierPool) -> int:
    return pool._process.pid


def _wait_until(condition, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Right scores, wherever they are asked for.


def test_right_from_an_event_loop(answer_pool):
    async def ask():
        return await asyncio.gather(
            answer_pool.ask("equal", r"\frac{1}{2}", "0.5"),
            answer_pool.ask("equal", r"\frac{1}{2}", r"\frac{1}{3}"),
            answer_pool.ask("equal", "n = 4", "4"),
            answer_pool.ask("search", r"(?s)^<think>.*</think>", "<think>\n</think> 4"),
        )

    assert asyncio.run(ask()) == [Outcome.YES, Outcome.NO, Outcome.YES, Outcome.YES]


def test_right_from_several_threads_with_a_loop_each(answer_pool):
    outcomes = {}

    def run(thread_index):
        async def ask():
            return await asyncio.gather(
                *(answer_pool.ask("equal", rf"\frac{{{n}}}{{7}}", r"\frac{3}{7}") for n in range(6))
            )

        outcomes[thread_index] = asyncio.run(ask())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    expected = [Outcome.YES if n == 3 else Outcome.NO for n in range(6)]
    assert [outcomes[index] for index in range(3)] == [expected] * 3


def test_right_from_a_worker_process():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        call = executor.submit(ask_in_this_process, r"\frac{1}{2}", "0.5", r"\frac{1}{3}")
        outcomes, is_worker_process = call.result(timeout=120)
    assert outcomes == [Outcome.YES, Outcome.NO]
    assert is_worker_process


# Deadlines.


def test_after_ten_pathological_answers_the_eleventh_is_scored_within_its_deadline(answer_pool):
    async def ask():
        late = await asyncio.gather(
            *(answer_pool.ask("equal", "7", _PATHOLOGICAL_ANSWER) for _ in range(10))
        )
        start = time.monotonic()
        eleventh = await answer_pool.ask("equal", r"\frac{1}{2}", "0.5")
        return late, eleventh, time.monotonic() - start

    late, eleventh, seconds = asyncio.run(ask())
    assert late == [Outcome.DEADLINE] * 10
    assert eleventh is Outcome.YES
    assert seconds < DEADLINE_SECONDS


def test_a_late_question_is_given_up_at_its_deadline(make_pool):
    pool = make_pool(1, 0.3)
    _ask(pool)  # the service has started
    start = time.monotonic()
    assert _ask(pool, left=_ENDLESS_PATTERN, right=_ENDLESS_TEXT) is Outcome.DEADLINE
    assert 0.29 < time.monotonic() - start < 3.0
    assert _ask(pool) is Outcome.YES


def test_one_slow_sample_stalls_no_other(make_pool):
    pool = make_pool(2, 2.0)

    async def ask():
        slow = asyncio.ensure_future(pool.ask("search", _ENDLESS_PATTERN, _ENDLESS_TEXT))
        await asyncio.sleep(0)
        quick = await asyncio.gather(*(pool.ask("search", "b", "abc") for _ in range(50)))
        was_done = slow.done()
        return quick, was_done, await slow

    quick, was_done, slow = asyncio.run(ask())
    assert quick == [Outcome.YES] * 50
    assert not was_done
    assert slow is Outcome.DEADLINE


def test_a_cancelled_caller_leaves_the_pool_working(make_pool):
    pool = make_pool(1, 0.5)

    async def ask():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.ask("search", _ENDLESS_PATTERN, _ENDLESS_TEXT), 0.1)
        return await pool.ask("search", "b", "abc")

    assert asyncio.run(ask()) is Outcome.YES


# Lives of processes.


@needs_proc
def test_killed_workers_are_replaced_and_a_question_survives_one_kill(make_pool):
    pool = make_pool()
    assert _ask(pool) is Outcome.YES
    service = _service_pid(pool)
    outcomes = []
    asking = threading.Thread(
        target=lambda: outcomes.append(_ask(pool, left=_ENDLESS_PATTERN, right=_ENDLESS_TEXT))
    )
    (idle,) = _children(service)
    os.kill(idle, signal.SIGKILL)
    _wait_until(lambda: _children(service) not in ([], [idle]))
    assert _ask(pool) is Outcome.YES

    asking.start()
    time.sleep(0.3)  # the worker is deep in the search
    (first,) = _children(service)
    os.kill(first, signal.SIGKILL)
    _wait_until(lambda: _children(service) not in ([], [first]))
    time.sleep(0.3)
    assert outcomes == []  # tried once more
    (second,) = _children(service)
    os.kill(second, signal.SIGKILL)
    asking.join(timeout=20)
    assert outcomes == [Outcome.CRASH]
    assert _ask(pool) is Outcome.YES


@needs_proc
def test_a_worker_cannot_take_all_the_memory(make_pool):
    pool = make_pool()
    _ask(pool)
    (worker,) = _children(_service_pid(pool))
    limits = pathlib.Path(f"/proc/{worker}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert line.split()[3] == str(4 << 30)


def test_a_killed_service_is_replaced_and_open_questions_asked_again(make_pool):
    pool = make_pool(1, 1.0)
    _ask(pool)

    async def ask():
        open_questions = [
            asyncio.ensure_future(pool.ask("search", _ENDLESS_PATTERN, _ENDLESS_TEXT)),
            asyncio.ensure_future(pool.ask("search", "b", "abc")),
        ]
        await asyncio.sleep(0.2)
        os.kill(_service_pid(pool), signal.SIGKILL)
        return await asyncio.gather(*open_questions)

    assert asyncio.run(ask()) == [Outcome.DEADLINE, Outcome.YES]


def test_a_silent_service_is_replaced(make_pool, monkeypatch):
    monkeypatch.setattr(verifier_pool, "_SILENCE_SECONDS", 0.2)
    pool = make_pool(1, 0.3)
    _ask(pool)
    stopped = _service_pid(pool)
    os.kill(stopped, signal.SIGSTOP)
    assert _ask(pool) is Outcome.YES
    assert _service_pid(pool) != stopped


def test_a_service_that_cannot_start_is_an_error_and_no_score(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = _search_pool()
    with pytest.raises(VerifierUnavailableError, match="died 3 times at its start"):
        _ask(pool)
    with pytest.raises(VerifierUnavailableError, match="died 3 times at its start"):
        _ask(pool)
    pool.close()


@needs_proc
def test_closing_ends_every_process_and_fails_open_questions(make_pool):
    pool = make_pool(2)
    _ask(pool)
    processes = [_service_pid(pool), *_children(_service_pid(pool))]

    async def ask():
        asking = asyncio.ensure_future(pool.ask("search", _ENDLESS_PATTERN, _ENDLESS_TEXT))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        await asking

    with pytest.raises(VerifierUnavailableError, match="closed"):
        asyncio.run(ask())
    _wait_until(lambda: not any(map(_is_alive, processes)))
    pool.close()


_SCRIPT_WITHOUT_MAIN_GUARD = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pipeline_rl_jax.rewards.verifier_pool import VerifierPool
pool = VerifierPool(num_workers=2, deadline_seconds=3600.0, kinds={"search"})
async def main():
    print((await pool.ask("search", "b", "abc")).value, pool._process.pid, flush=True)
    await pool.ask("search", sys.argv[2], sys.argv[3])
asyncio.run(main())
"""


@needs_proc
@pytest.mark.parametrize("victim", ["script", "script and service"])
def test_no_process_outlives_a_killed_script_without_main_guard(tmp_path, victim):
    script = tmp_path / "train.py"
    # A worker that lost its service ends at its deadline at the latest.
    deadline = "3600.0" if victim == "script" else "1.0"
    script.write_text(_SCRIPT_WITHOUT_MAIN_GUARD.replace("3600.0", deadline))
    root = str(pathlib.Path(verifier_pool.__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(script), root, _ENDLESS_PATTERN, _ENDLESS_TEXT],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        outcome, service = process.stdout.readline().split()
        assert outcome == "yes"
        processes = [int(service), *_children(int(service))]
        assert len(processes) == 3
        time.sleep(0.3)  # one worker is busy for ever, one is idle
        process.kill()
        if victim != "script":
            os.kill(int(service), signal.SIGKILL)
    _wait_until(lambda: not any(map(_is_alive, processes)))

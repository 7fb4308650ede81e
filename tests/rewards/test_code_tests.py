import asyncio
import dataclasses
import json
import os
import pathlib
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from pipeline_rl_jax.records import Completion, Prompt
from pipeline_rl_jax.rewards.code_tests import (
    CodeLimits,
    CodeTests,
    find_tests,
    last_python_block,
)
from pipeline_rl_jax.rewards.score import Score
from tests.fakes.completions import make_text_completion

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are confined on Linux")

# Wall time is generous: the tests share their machine, and only two of them run into it.
LIMITS = CodeLimits(
    wall_seconds=4.0, cpu_seconds=1, memory_bytes=256 << 20, output_bytes=1 << 16, max_processes=6
)
LOOP = "while True: pass"
FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
MEMORY_HOG = "data = []\nwhile True: data.append(bytearray(1 << 24))"
CALL = '["assert 1"]'


@pytest.fixture(scope="module", params=["namespaces", "refusals"])
def scorer(request) -> Iterator[CodeTests]:
    """Both ways to confine a program; where namespaces are not allowed, only one of them."""
    made = CodeTests(
        score="share", num_workers=4, limits=LIMITS, namespaces=request.param == "namespaces"
    )
    if request.param == "namespaces" and not made.isolation:
        pytest.skip("this host allows no namespaces")
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def confined(scorer) -> CodeTests:
    if not scorer.isolation:
        pytest.skip("only with namespaces")
    return scorer


def code(program: str, tests: object) -> Completion:
    answer = tests if isinstance(tests, str) else json.dumps(tests)
    return make_text_completion(f"Here it is:\n```python\n{program}\n```\nDone.", answer=answer)


def score(scorer: CodeTests, program: str, tests: object = CALL) -> Score:
    result = asyncio.run(scorer.score(code(program, tests)))
    assert not result.error, result
    return result


def test_share_of_the_tests_passed(scorer):
    tests = ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 4"]
    assert score(scorer, "def f(x):\n    return x + 1", tests).value == pytest.approx(2 / 3)


def test_programs_that_read_and_print(scorer):
    tests = [{"input": "1 2\n", "output": "3"}, {"input": "1 2\n", "output": "4"}]
    assert score(scorer, "print(sum(map(int, input().split())))  ", tests).value == 0.5
    guarded = 'if __name__ == "__main__":\n    print(int(input()) * 2)'
    assert score(scorer, guarded, [{"input": "4", "output": "8\n"}]).value == 1.0


def test_the_main_part_of_a_program_is_left_out_when_it_is_called(scorer):
    program = 'def f():\n    return 3\nif __name__ == "__main__":\n    input()'
    assert score(scorer, program, ["assert f() == 3"]).value == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import os; os.closerange(0, 64)",
        "def f(:",
        "f = '''",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os._exit(0)",
        "import os; os.write(4, b'1'); os._exit(0)",
    ],
)
def test_a_program_that_ends_before_its_test_does_not_pass(scorer, program):
    assert score(scorer, program).value == 0.0


def test_closing_stdout_and_printing_much_is_no_failure_of_a_call(scorer):
    assert score(scorer, "import sys; sys.stdout.close()").value == 1.0
    assert score(scorer, "import os; os.close(1)").value == 1.0


def test_output_is_bounded(scorer):
    flood = "while True: print('x' * 1000)"
    assert score(scorer, flood, [{"input": "", "output": "x"}]).value == 0.0


@pytest.mark.parametrize("program", [LOOP, MEMORY_HOG, FORK_BOMB])
def test_a_program_beyond_its_limits_fails_in_time(scorer, program):
    started = time.monotonic()
    assert score(scorer, program).value == 0.0
    assert time.monotonic() - started < 12.0


def test_sleeping_until_the_deadline_is_counted():
    limits = dataclasses.replace(LIMITS, wall_seconds=1.5)
    scorer = CodeTests(score="all", num_workers=1, limits=limits)
    result = score(scorer, "import time; time.sleep(60)")
    assert (result.value, result.event) == (0.0, "code_deadline")
    asyncio.run(scorer.close())


def test_after_ten_bad_programs_the_eleventh_is_scored_in_time(scorer):
    bad = [
        LOOP,
        FORK_BOMB,
        MEMORY_HOG,
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.abort()",
    ]
    good = code("def f():\n    return 1", ["assert f() == 1"])

    async def run() -> tuple[list[Score], float]:
        await asyncio.gather(*(scorer.score(code(program, CALL)) for program in bad * 2))
        started = time.monotonic()
        return await asyncio.gather(*(scorer.score(good) for _ in range(2))), started

    scores, started = asyncio.run(run())
    assert [each.value for each in scores] == [1.0, 1.0]
    assert time.monotonic() - started < LIMITS.wall_seconds


def test_there_is_no_network(scorer):
    program = (
        "import socket\n"
        "try:\n"
        "    socket.create_connection(('127.0.0.1', PORT), timeout=1)\n"
        "    reached = True\n"
        "except OSError:\n"
        "    reached = False"
    )

    async def run() -> tuple[Score, int]:
        num_connections = 0

        async def count(reader, writer) -> None:
            nonlocal num_connections
            num_connections += 1
            writer.close()

        server = await asyncio.start_server(count, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        completion = code(program.replace("PORT", str(port)), ["assert not reached"])
        result = await scorer.score(completion)
        server.close()
        return result, num_connections

    result, num_connections = asyncio.run(run())
    assert num_connections == 0
    assert result.value == 1.0


def test_files_can_be_written_in_its_own_directory_only(scorer):
    with tempfile.TemporaryDirectory() as outside:
        os.chmod(outside, 0o777)
        path = pathlib.Path(outside, "mark")
        program = (
            "open('own', 'w').write('x')\n"
            "assert open('own').read() == 'x'\n"
            f"try: open({str(path)!r}, 'w').write('x')\n"
            "except OSError: pass"
        )
        assert score(scorer, program).value == 1.0
        assert not path.exists()


def test_a_test_finds_nothing_of_the_one_before(scorer):
    program = (
        "import os\n"
        "def f():\n"
        "    found = os.listdir('.')\n"
        "    open('left', 'w').close()\n"
        "    return found"
    )
    assert score(scorer, program, ["assert f() == []", "assert f() == []"]).value == 1.0


def test_files_of_others_in_the_temporary_directory_are_not_to_be_seen(confined):
    with tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0o644)
        program = f"import os; seen = os.path.exists({file.name!r})"
        assert score(confined, program, ["assert not seen"]).value == 1.0


def test_what_a_program_leaves_running_is_killed(confined):
    mark = secrets.token_hex(8)
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        open('started', 'w').close()\n"
        "        sleep = 'import time; time.sleep(60)'\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', sleep, {mark!r}])\n"
        "    os._exit(0)\n"
        "while not os.path.exists('started'): time.sleep(0.01)"
    )
    assert score(confined, program, ["assert os.path.exists('started')"]).value == 1.0
    assert not [
        path
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
        if mark.encode() in _read_if_there(path)
    ]


def _read_if_there(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended meanwhile
        return b""


def test_the_number_of_processes_is_bounded(confined):
    program = (
        "import os, time\n"
        "started = 0\n"
        "try:\n"
        "    while started < 50:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "        started += 1\n"
        "except OSError: pass"
    )
    assert score(confined, program, [f"assert started == {LIMITS.max_processes - 1}"]).value == 1.0


def test_nothing_is_left_on_the_disk(scorer):
    before = set(pathlib.Path(tempfile.gettempdir()).glob("code-tests-*"))
    score(scorer, "import os; os.mkdir('d'); open('d/file', 'w').close()")
    assert set(pathlib.Path(tempfile.gettempdir()).glob("code-tests-*")) <= before


def test_all_or_nothing():
    scorer = CodeTests(score="all", num_workers=1, limits=LIMITS)
    program = "def f(x):\n    return x"
    assert score(scorer, program, ["assert f(1) == 1", "assert f(2) == 3"]).value == 0.0
    assert score(scorer, program, ["assert f(1) == 1", "assert f(2) == 2"]).value == 1.0
    asyncio.run(scorer.close())
    closed = asyncio.run(scorer.score(code(program, CALL)))
    assert closed.error == "code_sandbox_failed"


def test_it_scores_from_a_thread(scorer):
    results: list[Score] = []
    thread = threading.Thread(target=lambda: results.append(score(scorer, "x = 1", ["assert x"])))
    thread.start()
    thread.join()
    assert results[0].value == 1.0


def test_no_program_is_a_score_and_no_test_is_an_error(scorer):
    completion = make_text_completion("I cannot.", answer=CALL)
    assert asyncio.run(scorer.score(completion)) == Score(value=0.0, event="code_missing")
    for answer in ("", "[]", "4", '[{"input": "1"}]'):
        result = asyncio.run(scorer.score(code("x = 1", answer)))
        assert result.error == "code_tests_missing"


def test_a_sandbox_that_cannot_run_python_is_refused_at_the_start():
    limits = dataclasses.replace(LIMITS, memory_bytes=1 << 20)
    with pytest.raises(RuntimeError, match="cannot run Python"):
        CodeTests(score="all", num_workers=1, limits=limits)


def test_tests_of_the_metadata_come_before_the_answer():
    prompt = make_text_completion("", answer=CALL).prompt
    prompt = dataclasses.replace(prompt, metadata={"tests": ("assert 2",)})
    assert isinstance(prompt, Prompt)
    assert find_tests(prompt) == [{"call": "assert 2"}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```py\nx = '''\n  ```'''\n```", "x = '''\n  ```'''\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("a = 1", None),
        ("```bash\nls\n```", None),
    ],
)
def test_the_last_python_block(text, expected):
    assert last_python_block(text) == expected

import json
import pathlib
import subprocess
import sys

import pytest

from pipeline_rl_jax.rewards import code_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are confined on Linux")

SANDBOX = pathlib.Path(code_tests.__file__).with_name("code_sandbox.py")


def run(directory: pathlib.Path, program: str, tests: list, **changes):
    job = {
        "directory": str(directory), "program": program, "tests": tests, "stop_at_failure": False,
        "namespaces": True, "wall_seconds": 8.0, "cpu_seconds": 2, "memory_bytes": 256 << 20,
        "output_bytes": 1 << 16, "max_processes": 4, **changes,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-I", "-S", "-B", str(SANDBOX)],
        input=json.dumps(job), capture_output=True, text=True, env={},
    )  # fmt: skip


def passed(done: subprocess.CompletedProcess) -> list[bool]:
    assert done.stderr == ""
    return json.loads(done.stdout)["passed"]


@pytest.mark.parametrize("namespaces", [True, False])
def test_one_verdict_for_each_test(tmp_path, namespaces):
    tests = [{"call": "assert x == 1"}, {"call": "assert x == 2"}, {"call": "assert x"}]
    assert passed(run(tmp_path, "x = 1", tests, namespaces=namespaces)) == [True, False, True]


def test_it_can_stop_at_the_first_failure(tmp_path):
    tests = [{"call": "assert x == 1"}, {"call": "assert x == 2"}, {"call": "assert x"}]
    assert passed(run(tmp_path, "x = 1", tests, stop_at_failure=True)) == [True, False]


def test_no_test_is_begun_after_the_deadline(tmp_path):
    program = "import time\ndef f(): time.sleep(60)"
    tests = [{"call": "1"}, {"call": "f()"}, {"call": "1"}]
    reply = json.loads(run(tmp_path, program, tests, wall_seconds=2.5).stdout)
    assert reply["passed"] == [True, False]
    assert reply["late"]


def test_processor_time_is_limited_per_test(tmp_path):
    tests = [{"call": "while True: pass"}, {"call": "assert x"}]
    assert passed(run(tmp_path, "x = 1", tests, cpu_seconds=1)) == [False, True]


def test_output_is_compared_without_white_space_at_line_ends(tmp_path):
    program = "print('1  '); print('2'); print()"
    tests = [{"input": "", "output": "1\n2"}, {"input": "", "output": "1\n 2"}]
    assert passed(run(tmp_path, program, tests)) == [True, False]


def test_a_program_that_prints_the_output_and_then_fails_does_not_pass(tmp_path):
    assert passed(run(tmp_path, "print(1); 1 / 0", [{"input": "", "output": "1"}])) == [False]


def test_a_fault_of_the_sandbox_is_no_verdict(tmp_path):
    done = run(tmp_path / "missing", "x = 1", [{"call": "assert x"}], namespaces=False)
    assert done.stdout == ""
    assert "missing" in done.stderr

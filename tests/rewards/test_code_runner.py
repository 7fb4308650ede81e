import json
import pathlib
import subprocess
import sys

import pytest

from pipeline_rl_jax.rewards import code_runner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are confined on Linux")

SOURCE = pathlib.Path(code_runner.__file__).read_text()
# Descriptors 3 and 4 as the sandbox gives them.
START = 'exec "$0" -S -s -P -B -c "$1" 3<job 4>verdict'


def run(directory: pathlib.Path, program: str, *, call: str | None = "", refuse: bool = True):
    work = directory / "work"
    work.mkdir()
    (directory / "solution.py").write_text(program)
    job = {"program": "../solution.py", "call": call, "word": "word", "refuse": refuse}
    (work / "job").write_text(json.dumps(job))
    done = subprocess.run(
        ["bash", "-c", START, sys.executable, SOURCE], cwd=work, capture_output=True, text=True
    )
    return done, (work / "verdict").read_text()


def test_the_word_is_said_once_the_test_has_passed(tmp_path):
    done, said = run(tmp_path, "def f():\n    return 2", call="assert f() == 2")
    assert (done.returncode, said) == (0, "word")


def test_nothing_is_said_of_a_test_that_failed(tmp_path):
    done, said = run(tmp_path, "def f():\n    return 2", call="assert f() == 3")
    assert (done.returncode, said) == (1, "")


def test_without_a_call_the_program_is_run_as_the_main_one(tmp_path):
    done, said = run(tmp_path, "print(__name__)", call=None)
    assert (done.stdout, said) == ("__main__\n", "")


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.execv('/bin/true', ['true'])",
        "import ctypes",
        "open('../outside', 'w')",
        "import os; os.open('../outside', os.O_CREAT | os.O_WRONLY)",
        "import os; os.remove('../solution.py')",
    ],
)
def test_what_leaves_the_process_is_refused_on_demand(tmp_path, program):
    done, said = run(tmp_path, program)
    assert "is not allowed here" in done.stderr
    assert said == ""
    assert (tmp_path / "solution.py").exists()
    assert not (tmp_path / "outside").exists()


def test_ordinary_work_is_not_refused(tmp_path):
    program = (
        "import collections, dataclasses, heapq, itertools, json, math, random, re, typing\n"
        "open('mine', 'w').write('x')\n"
        "assert open('mine').read() == 'x'"
    )
    done, said = run(tmp_path, program)
    assert (done.stderr, said) == ("", "word")


def test_nothing_is_refused_where_namespaces_do_it(tmp_path):
    done, said = run(tmp_path, "import os; os.system('true')", refuse=False)
    assert (done.stderr, said) == ("", "word")

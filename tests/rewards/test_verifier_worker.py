"""The service as a program; how it treats workers is tested through `test_verifier_pool.py`."""

import json
import os
import subprocess
import sys

from pipeline_rl_jax.rewards import verifier_worker


def test_the_service_imports_neither_jax_nor_numpy():
    program = (
        "import sys, pipeline_rl_jax.rewards.verifier_worker as worker\n"
        "print(sorted({'jax', 'numpy', 'sympy', 'math_verify'} & set(sys.modules)))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(verifier_worker.__file__)))
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert output.stdout.strip() == "[]"


def test_the_service_answers_over_pipes_and_ends_with_its_input():
    root = os.path.dirname(os.path.dirname(os.path.dirname(verifier_worker.__file__)))
    arguments = ["2", "5", str(os.getpid()), "search"]
    questions = [[0, "search", "b+", "abc"], [1, "search", "^b", "abc"]]
    output = subprocess.run(
        [sys.executable, "-P", "-m", verifier_worker.__name__, *arguments],
        input="".join(json.dumps(question) + "\n" for question in questions),
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(output.stdout.splitlines()[0]) == ["ready", ""]
    assert output.stderr == ""

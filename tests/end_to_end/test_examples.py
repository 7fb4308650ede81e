"""The examples of docs/examples run as they stand."""

import ast
import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_oppo_around_a_loop_of_ones_own(capsys):
    runpy.run_path(str(EXAMPLES / "oppo_loop.py"), run_name="__main__")
    *steps, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in steps] == [f"step {number}" for number in range(5)]
    assert int(re.search(r"read ahead (\d+)", steps[-1])[1]) > 0
    deferred = ast.literal_eval(re.search(r"steps: (\{.*?\})", last)[1])
    assert sum(deferred.values()) == 15  # five batches of three groups
    assert last.endswith("left: {}")

import ast
import pathlib

import pytest

from pipeline_rl_jax import orchestrate

LOOPS = [
    "acting",
    "conventional",
    "failures",
    "flow",
    "learning",
    "one_step_off",
    "pipeline",
    "rounds",
    "stages",
    "threads",
]


@pytest.mark.parametrize("name", LOOPS)
def test_schedules_hold_no_array_maths(name):
    source = pathlib.Path(orchestrate.__path__[0], f"{name}.py").read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported
    assert not imported & {"jax", "numpy", "flax", "optax"}

"""Our engine's verbs and keyword names against JetStream's, read from its wheel if it is there.

    pip install --no-deps google-jetstream==0.2.2
    pytest -m parity tests/generation/test_jetstream_api.py

The wheel is only read: importing it would need TensorFlow.
"""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from pipeline_rl_jax.generation.engine import Engine

pytestmark = pytest.mark.parity

# What differs by design: `params` are an argument of every call, a prefill takes several prompts
# and samples nothing, and the tokenizer is no business of the engine.
RENAMED = {"true_length": "true_lengths"}
LEFT_OUT = {
    "existing_prefix",
    "get_prefix_destination_sharding",
    "get_tokenizer",
    "build_tokenizer",
    "colocated_cpus",
}


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[str]]:
    """Name of a method or property of JetStream's `Engine` → its parameters."""
    spec = importlib.util.find_spec("jetstream")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("google-jetstream is not installed")
    source = Path(spec.submodule_search_locations[0]) / "engine" / "engine_api.py"
    tree = ast.parse(source.read_text())
    (engine,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Engine"
    ]
    return {
        method.name: [arg.arg for arg in (*method.args.args[1:], *method.args.kwonlyargs)]
        for method in engine.body
        if isinstance(method, ast.FunctionDef)
    }


def test_every_verb_is_there_under_its_name(theirs):
    assert len(theirs) > 8
    assert [name for name in theirs if not hasattr(Engine, name) and name not in LEFT_OUT] == []


def test_arguments_have_the_same_names(theirs):
    for name, parameters in theirs.items():
        ours = getattr(Engine, name, None)
        if ours is None or isinstance(ours, property):
            continue
        known = inspect.signature(ours).parameters
        wanted = [RENAMED.get(each, each) for each in parameters if each not in LEFT_OUT]
        assert [each for each in wanted if each not in known] == [], name

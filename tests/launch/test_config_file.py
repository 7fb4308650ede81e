import pytest

from config_file import load_config
from pipeline_rl_jax.settings import SettingsError

GOOD = """
from ml_collections import ConfigDict

def get_config(size="small"):
    return ConfigDict({"size": size})
"""


def problem_of(value) -> str:
    with pytest.raises(SettingsError) as caught:
        load_config(str(value))
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


def test_config_with_and_without_argument(tmp_path):
    path = tmp_path / "good.py"
    path.write_text(GOOD)
    assert load_config(str(path)).size == "small"
    assert load_config(f"{path}:large").size == "large"


def test_configs_import_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # wherever the program is started
    path = tmp_path / "mine.py"
    path.write_text("from configs import base\n\nget_config = base.get_config\n")
    assert load_config(str(path)).seed == 42


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("def get_config():\n    return unknown\n", 2, "NameError: name 'unknown' is not defined"),
        ("x = 1\ny = x / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("import nowhere\n", 1, "ModuleNotFoundError: No module named 'nowhere'"),
        ("x = (\n", 1, "SyntaxError: '(' was never closed"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError: Expecting property name"),
        (
            "from configs import base\nconfig = base.get_config()\nconfig.seed = 'x'\n",
            3,
            "TypeError: ",
        ),
    ],
)
def test_an_error_in_the_file_names_its_line(tmp_path, text, line, error):
    path = tmp_path / "bad.py"
    path.write_text(text)
    assert problem_of(path).startswith(f"{path}, line {line}: {error}")


def test_missing_file_says_what_was_meant(tmp_path):
    assert problem_of("configs/bsae.py").endswith("does not exist; did you mean configs/base.py?")
    assert problem_of("base").endswith("does not exist; did you mean configs/base.py?")
    (tmp_path / "first_try.py").write_text(GOOD)
    problem = problem_of(tmp_path / "first_tri.py")
    assert problem.endswith(f"did you mean {tmp_path / 'first_try.py'}?")


def test_missing_file_unlike_any_lists_what_there_is():
    assert "does not exist; there are configs/base.py" in problem_of("/nowhere/zzzzzz.py")


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        ("type('Own', (Exception,), {})('mine')", "line 2: Own: mine"),
        ("SystemExit(3)", "line 2: SystemExit: 3"),
    ],
)
def test_whatever_a_config_raises_is_told(tmp_path, raised, error):
    path = tmp_path / "raises.py"
    path.write_text(f"def get_config():\n    raise {raised}\n")
    assert problem_of(path).endswith(error)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("ml_collections.ConfigDict()", "returns an empty ConfigDict; start from configs/base.py"),
        (
            "ml_collections.FrozenConfigDict({'a': 1})",
            "not a FrozenConfigDict; return ConfigDict(config)",
        ),
    ],
)
def test_a_config_that_cannot_be_used(tmp_path, expression, problem):
    path = tmp_path / "config.py"
    path.write_text(f"import ml_collections\n\ndef get_config():\n    return {expression}\n")
    assert problem_of(path).endswith(problem)


def test_not_a_config(tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert problem_of(empty).endswith("has no function get_config(); start from configs/base.py")
    plain = tmp_path / "plain.py"
    plain.write_text("def get_config():\n    return {}\n")
    assert "get_config() must return a ConfigDict, not dict" in problem_of(plain)
    nul = tmp_path / "nul.py"
    nul.write_text("\0")
    assert problem_of(nul).startswith(f"{nul}: SyntaxError: ")
    text = tmp_path / "config.yaml"
    text.write_text("seed: 1")
    assert "must be a Python file" in problem_of(text)
    assert "is a directory" in problem_of(tmp_path)

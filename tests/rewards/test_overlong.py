import asyncio

import pytest

from pipeline_rl_jax.rewards.overlong import Overlong, overlong_penalty
from tests.fakes.completions import make_text_completion


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)],
)
def test_the_last_twenty_of_a_hundred_tokens_cost(num_tokens, penalty):
    actual = overlong_penalty(num_tokens, max_new_tokens=100, buffer_tokens=20)
    assert actual == pytest.approx(penalty, abs=1e-12)


@pytest.mark.parametrize("num_tokens", [0, 99, 100])
def test_a_buffer_of_zero_is_off(num_tokens):
    assert overlong_penalty(num_tokens, max_new_tokens=100, buffer_tokens=0) == 0.0


def test_the_scorer_counts_completion_tokens():
    completion = make_text_completion("", answer="1", num_tokens=90)
    score = asyncio.run(Overlong(max_new_tokens=100, buffer_tokens=20).score(completion))
    assert score.value == -0.5
    assert not score.error

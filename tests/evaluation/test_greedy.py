"""Greedy accuracy: one grader with training, failures count as wrong."""

import asyncio
import dataclasses
import math

import pytest

from pipeline_rl_jax.evaluation.greedy import GreedyEvaluator, score_all
from pipeline_rl_jax.records import StopReason
from pipeline_rl_jax.rewards.score import ScoredCompletion, ScoringFailure
from tests.fakes.rollouts import make_completion, make_prompt


class Scorer:
    """Right when the completion has more than one token; no score at three."""

    async def score(self, completion):
        if completion.num_tokens == 3:
            return ScoringFailure(reason="gold_empty")
        correct = float(completion.num_tokens > 1)
        return ScoredCompletion(reward=7.0, components={}, correct=correct)


def of_length(length):
    return make_completion(make_prompt(), [1] * length)


def completions(lengths):
    return [of_length(length) for length in lengths]


def test_accuracy_counts_right_answers_not_rewards():
    evaluation = asyncio.run(score_all(completions([1, 2, 3, 4]), Scorer()))
    assert evaluation.accuracy == 0.5
    assert evaluation.mean_tokens == 2.5
    assert evaluation.mean_reward == 7.0  # of the three that have one
    assert evaluation.metrics()["evaluation/accuracy_share"] == 0.5


def test_where_nothing_is_right_or_wrong_only_the_reward_is_reported():
    class Preference:
        async def score(self, completion):
            if completion.num_tokens == 3:
                return ScoringFailure(reason="reward_model_context")
            return ScoredCompletion(
                reward=float(completion.num_tokens), components={}, correct=None
            )

    evaluation = asyncio.run(score_all(completions([1, 2, 3, 5]), Preference()))
    assert evaluation.accuracy is None
    assert evaluation.mean_reward == pytest.approx(8 / 3)
    assert "evaluation/accuracy_share" not in evaluation.metrics()
    failed = asyncio.run(score_all(completions([3]), Preference()))
    assert math.isnan(failed.mean_reward)


def test_truncated_share():
    cut = dataclasses.replace(of_length(2), stop_reason=StopReason.MAX_NEW_TOKENS)
    whole = dataclasses.replace(of_length(2), stop_reason=StopReason.EOS)
    evaluation = asyncio.run(score_all([cut, whole, whole, whole], Scorer()))
    assert evaluation.truncated_share == 0.25


def test_an_empty_set_is_an_error():
    with pytest.raises(ValueError, match=r"evaluation.num_prompts"):
        asyncio.run(score_all([], Scorer()))


def test_every_evaluation_has_a_batcher_of_its_own():
    made = []

    class Batcher:
        def __init__(self):
            self.live = 0
            made.append(self)

        @property
        def num_live(self):
            return self.live

        def admit(self, prompt, group_size):
            self.live += group_size

        def advance(self, weights):
            self.live -= 1
            return [of_length(2)]

    evaluator = GreedyEvaluator([None, None, None], make_batcher=Batcher, scorer=Scorer())
    assert evaluator.num_prompts == 3
    assert len(evaluator.decode(None)) == len(evaluator.decode(None)) == 3
    assert len(made) == 2
    assert asyncio.run(evaluator.grade(evaluator.decode(None))).accuracy == 1.0

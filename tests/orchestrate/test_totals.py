"""Totals of a run by hand, and their way through a checkpoint."""

import dataclasses
import json

import pytest

from pipeline_rl_jax.evaluation.greedy import Evaluation
from pipeline_rl_jax.generation.batcher import BatcherCounts
from pipeline_rl_jax.orchestrate.totals import RunTotals
from pipeline_rl_jax.records import Group, Rollout
from tests.fakes.rollouts import make_completion, make_prompt


def group(*versions):
    prompt = make_prompt()
    rollouts = [
        Rollout(completion=make_completion(prompt, [1] * len(v), versions=v), reward=0.0)
        for v in versions
    ]
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def metrics(*, tokens, lag, lag_max):
    return {
        "batch/rollouts": 2.0,
        "batch/loss_tokens": tokens,
        "batch/tokens": 2 * tokens,
        "lag/mean_steps": lag,
        "lag/max_steps": lag_max,
        "trainer/busy_seconds": 4.0,
    }


def make_totals():
    totals = RunTotals()
    totals.add_step([group([0, 0], [0, 1])], metrics(tokens=10.0, lag=1.0, lag_max=2.0))
    totals.add_step([group([1], [1, 2, 2])], metrics(tokens=30.0, lag=3.0, lag_max=1.0))
    before, now = (
        BatcherCounts(),
        BatcherCounts(decoded_tokens=50, busy_seconds=2.0, inflight_updates=2),
    )
    totals.add_generation(before, now, seconds=5.0)
    return totals


def test_summary_by_hand():
    summary = make_totals().summary(version=2, finished=True)
    assert summary.samples == 4
    assert summary.mixed_version_share == 0.5
    assert summary.lag_mean_steps == (10 * 1 + 30 * 3) / 40  # weighted by tokens, not by step
    assert summary.lag_max_steps == 2.0
    assert summary.samples_per_second == pytest.approx(4 / 5)
    assert summary.decode_tokens_per_second == 25.0
    assert summary.train_tokens_per_second == 80 / 8
    assert summary.inflight_updates == 2


def test_nothing_done_is_not_measured():
    summary = RunTotals().summary(version=0, finished=False)
    assert summary.lag_mean_steps is None
    assert summary.samples_per_second is None
    assert summary.accuracy_before is None


def test_totals_survive_a_checkpoint():
    totals = make_totals()
    stored = json.loads(json.dumps(dataclasses.asdict(totals)))
    assert RunTotals.restore(stored) == totals


def test_the_first_evaluation_and_the_newest_are_kept():
    totals = RunTotals()
    for version, (accuracy, reward) in enumerate([(0.25, 1.0), (0.5, 2.0), (None, 3.0)]):
        evaluation = Evaluation(
            num_prompts=8,
            accuracy=accuracy,
            mean_reward=reward,
            mean_tokens=1.0,
            truncated_share=0.0,
        )
        totals.add_evaluation(evaluation, is_first=version == 0)
    summary = totals.summary(version=2, finished=True)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, None)
    assert (summary.reward_before, summary.reward_after) == (1.0, 3.0)

import dataclasses

import numpy as np
import pytest

from pipeline_rl_jax.preprocess.batches import assemble
from pipeline_rl_jax.preprocess.statistics import batch_statistics, rollout_statistics
from pipeline_rl_jax.records import Group, Rollout, StopReason
from tests.fakes.rollouts import make_completion, make_prompt
from tests.fakes.settings import make_settings


def make_rollout(prompt, reward, *, length, versions=0, stop_reason=StopReason.EOS, **components):
    completion = make_completion(prompt, range(length), versions=versions, stop_reason=stop_reason)
    return Rollout(completion=completion, reward=reward, reward_components=components)


def make_groups():
    sums, words = make_prompt(0, task="sums"), make_prompt(1, task="words")
    return [
        Group(
            prompt=sums,
            rollouts=(
                make_rollout(sums, 1.0, length=2, versions=[3, 4], correct=1.0, overlong=0.0),
                make_rollout(
                    sums,
                    0.5,
                    length=4,
                    correct=1.0,
                    overlong=-0.5,
                    stop_reason=StopReason.MAX_NEW_TOKENS,
                ),
                make_rollout(sums, float("nan"), length=3, versions=[1, 1, 2]),
            ),
        ),
        Group(
            prompt=words,
            rollouts=(
                make_rollout(words, 0.0, length=6, correct=0.0),
                make_rollout(words, 0.0, length=1, correct=0.0),
                make_rollout(words, 7.0, length=99, stop_reason=StopReason.CANCELLED),
            ),
        ),
        Group(prompt=make_prompt(2), rollouts=()),
    ]


def test_every_statistic_by_hand():
    result = assemble(
        make_groups(),
        make_settings(
            algorithm={"group_size": 3}, trainer={"tokens_per_row": 9, "rows_per_micro_batch": 1}
        ),
    )
    expected = {
        "reward/mean": 1.5 / 4,
        "reward/std": np.std([1.0, 0.5, 0.0, 0.0]),
        "reward/correct_mean": 0.5,
        "reward/overlong_mean": -0.25,  # over the two rollouts that have it
        "reward/task_sums_mean": 0.75,
        "reward/task_words_mean": 0.0,
        "completion/mean_tokens": (2 + 4 + 3 + 6 + 1) / 5,
        "completion/max_tokens": 6,
        "completion/truncated_share": 1 / 5,
        "completion/mixed_version_share": 2 / 5,
        "group/incomplete_groups": 1,
        "group/empty_groups": 1,
        "group/zero_variance_share": 1 / 2,
        "batch/rollouts": 4,
        "batch/rows": 3,  # 8, 6 + 3 (a full row), 4
        "batch/tokens": 4 + 6 + 8 + 3,
        "batch/fill_share": 21 / 27,
        "drops/cancelled_rollouts": 1,
        "drops/non_finite_reward_rollouts": 1,
        "drops/truncated_rollouts": 0,
        "drops/zero_variance_rollouts": 0,
        "drops/completion_tokens": 3 + 99,
    }
    assert set(result.statistics) == set(expected)
    for name, value in expected.items():
        assert result.statistics[name] == pytest.approx(value), name
        assert isinstance(result.statistics[name], float), name


def test_what_has_no_value_is_left_out():
    assert batch_statistics(None) == {"batch/rollouts": 0, "batch/rows": 0, "batch/tokens": 0}
    groups = [Group(prompt=make_prompt(), rollouts=())]
    empty = rollout_statistics(groups, zero_variance=np.zeros(0, bool), group_size=2)
    assert empty == {"group/incomplete_groups": 1, "group/empty_groups": 1}


def test_an_unscored_rollout_still_has_a_length():
    groups = make_groups()
    only_nan = dataclasses.replace(groups[0], rollouts=groups[0].rollouts[2:])
    statistics = rollout_statistics([only_nan], zero_variance=np.zeros(1, bool), group_size=1)
    assert "reward/mean" not in statistics
    assert statistics["completion/max_tokens"] == 3

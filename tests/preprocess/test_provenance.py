import numpy as np
import pytest

from pipeline_rl_jax.preprocess.provenance import lag_statistics
from pipeline_rl_jax.records import Completion, Group, Prompt, Rollout, StopReason

PROMPT = Prompt(prompt_id=0, token_ids=np.asarray([1], np.int32), text="", answer="")


def group(*versions, stop_reason=StopReason.EOS):
    rollouts = []
    for index, written in enumerate(versions):
        completion = Completion(
            prompt=PROMPT,
            sample_index=index,
            token_ids=np.zeros(len(written), np.int32),
            logprobs=np.zeros(len(written), np.float32),
            weight_versions=np.asarray(written, np.int32),
            stop_reason=stop_reason,
        )
        rollouts.append(Rollout(completion=completion, reward=0.0))
    return Group(prompt=PROMPT, rollouts=tuple(rollouts))


def test_by_hand():
    # Trained on by version 5. First: lags 3 3 2 2 | in flight 1 1 0 0, in queue 2 each.
    # Second: lags 1 1 1 1 0 0 0 0 | in flight 1 1 1 1 0 0 0 0, in queue 0 each.
    statistics = lag_statistics(
        [group([2, 2, 3, 3]), group([4, 4, 4, 4, 5, 5, 5, 5])], trained_version=5
    )
    assert statistics == pytest.approx(
        {
            "lag/in_flight_mean_steps": 6 / 12,
            "lag/in_queue_mean_steps": 8 / 12,
            "lag/quarter_1_mean_steps": (3 + 1 + 1) / 3,
            "lag/quarter_2_mean_steps": (3 + 1 + 1) / 3,
            "lag/quarter_3_mean_steps": (2 + 0 + 0) / 3,
            "lag/quarter_4_mean_steps": (2 + 0 + 0) / 3,
            "lag/at_0_steps_share": 4 / 12,
            "lag/at_1_steps_share": 4 / 12,
            "lag/at_2_steps_share": 2 / 12,
            "lag/at_3_steps_share": 2 / 12,
        }
    )


def test_the_two_parts_are_the_whole():
    rng = np.random.default_rng(0)
    written = [np.sort(rng.integers(0, 6, rng.integers(1, 30))) for _ in range(9)]
    statistics = lag_statistics([group(*written)], trained_version=7)
    mean = np.mean(7 - np.concatenate(written))
    parts = statistics["lag/in_flight_mean_steps"] + statistics["lag/in_queue_mean_steps"]
    assert parts == pytest.approx(mean)
    shares = {k: v for k, v in statistics.items() if k.startswith("lag/at_")}
    assert sum(shares.values()) == pytest.approx(1)


def test_short_and_empty_and_cancelled_completions():
    statistics = lag_statistics([group([3], [])], trained_version=3)
    assert statistics["lag/quarter_1_mean_steps"] == 0
    assert "lag/quarter_4_mean_steps" not in statistics
    assert lag_statistics([group([])], trained_version=3) == {}
    cancelled = group([1, 1], stop_reason=StopReason.CANCELLED)
    assert lag_statistics([cancelled], trained_version=3) == {}

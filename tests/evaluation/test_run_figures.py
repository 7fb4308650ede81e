"""Figures of hand-made metrics, worked out by hand."""

import pytest

from pipeline_rl_jax.evaluation.run_figures import (
    CommonGround,
    common_ground,
    mean_figures,
    reward_mean_height,
    reward_near,
    run_figures,
    steady_seconds,
    training_rows,
)


def make_row(step, *, seconds, reward, **changes):
    """Step `step` of 8 rollouts, ended at `seconds`."""
    return {
        "step": step,
        "run/samples": 8 * step,
        "run/train_seconds": seconds,
        "reward/mean": reward,
        "batch/rollouts": 8,
        **changes,
    }


def make_run():
    """Four steps that end at 10 (compilation), 12, 15 and 16 s."""
    lag = "lag/mean_steps"
    return [
        make_row(
            1,
            seconds=10.0,
            reward=0.0,
            **{
                "trainer/step_seconds": 10.0,
                "trainer/busy_seconds": 9.0,
                "trainer/idle_share": 0.1,
                "generation/idle_share": 0.9,
                "batch/loss_tokens": 100,
                "batch/tokens": 150,
                lag: 0.0,
                "lag/max_steps": 0,
                "importance/ess_raw_share": 1.0,
            },
        ),
        make_row(
            2,
            seconds=12.0,
            reward=0.4,
            **{
                "trainer/step_seconds": 2.0,
                "trainer/busy_seconds": 1.0,
                "trainer/idle_share": 0.5,
                "generation/idle_share": 0.0,
                "batch/loss_tokens": 300,
                "batch/tokens": 400,
                lag: 1.0,
                "lag/max_steps": 3,
                "importance/ess_raw_share": 0.8,
                "generation/tokens_per_second": 100.0,
                "generation/busy_slots_share": 1.0,
                "spans/decode_chunk_seconds": 1.0,
            },
        ),
        make_row(
            3,
            seconds=15.0,
            reward=0.8,
            **{
                "trainer/step_seconds": 3.0,
                "trainer/busy_seconds": 1.0,
                "trainer/idle_share": 0.0,
                "generation/idle_share": 0.5,
                "batch/loss_tokens": 100,
                "batch/tokens": 200,
                lag: 2.0,
                "lag/max_steps": 2,
                "importance/ess_raw_share": None,
                "generation/tokens_per_second": 200.0,
                "generation/busy_slots_share": 0.5,
                "spans/decode_chunk_seconds": 3.0,
            },
        ),
        make_row(
            4,
            seconds=16.0,
            reward=1.0,
            **{
                "trainer/step_seconds": 1.0,
                "trainer/busy_seconds": 0.5,
                "trainer/idle_share": 0.2,
                "generation/idle_share": 0.2,
                "batch/loss_tokens": 0,
                "batch/tokens": 0,
                lag: None,
                "lag/max_steps": None,
                "importance/ess_raw_share": 0.6,
            },
        ),
    ]


def figures(**changes):
    common = CommonGround(**{"samples": 32.0, "seconds": 6.0, **changes})
    return run_figures("row", make_run(), warmup_steps=1, common=common)


def test_speed_with_and_without_the_steps_that_compile():
    found = figures()
    assert found.seconds == 16.0
    assert found.samples_per_second == 32 / 16
    assert found.steady_samples_per_second == 24 / 6
    assert found.step_seconds_median == 2.0
    assert found.step_seconds_mean == 2.0
    assert found.train_tokens_per_second == 600 / 2.5
    assert found.decode_tokens_per_second == (1 * 100 + 3 * 200) / 4


def test_shares_are_of_time_and_lag_of_tokens():
    found = figures()
    assert found.trainer_idle_share == pytest.approx((2 * 0.5 + 3 * 0 + 1 * 0.2) / 6)
    assert found.generation_idle_share == pytest.approx((0 + 1.5 + 0.2) / 6)
    assert found.trainer_busy_share == pytest.approx(2.5 / 6)
    assert found.busy_slots_share == (1 * 1.0 + 3 * 0.5) / 4
    assert found.lag_mean_steps == (300 * 1 + 100 * 2) / 500
    assert found.lag_max_steps == 3
    assert found.ess_mean == pytest.approx((1.0 + 0.8 + 0.6) / 3)


def test_rewards_at_equal_samples_and_at_equal_time():
    found = figures(samples=24.0, seconds=2.0)
    assert found.reward_final == 1.0  # an eighth of 32 samples is half a batch: the last one
    assert found.reward_at_samples == 0.8
    assert found.reward_at_seconds == 0.4  # 2 s after warm-up step 2 had just ended
    assert figures(seconds=1.9).reward_at_seconds == 0.0  # the step of the warm-up


def test_reward_near_averages_an_eighth_of_the_samples():
    rows = [make_row(step, seconds=step, reward=float(step)) for step in range(1, 17)]
    assert reward_near(rows, 128) == 15.5  # steps 15 and 16 end within samples 113 to 128
    assert reward_near(rows, 127) == 14.5  # 111.1 to 127: 112 and 120
    assert reward_near(rows, 7) is None


def test_mean_height_is_a_trapezoid_cut_at_the_common_samples():
    rows = make_run()
    # 0 to 8: 0; to 16: mean 0.2; to 24: 0.6; to 32: 0.9.
    assert reward_mean_height(rows, 32) == pytest.approx((0 + 0.2 + 0.6 + 0.9) * 8 / 32)
    # Half of the third trapezoid: from 0.4 to 0.6.
    assert reward_mean_height(rows, 20) == pytest.approx((0.2 * 8 + 0.5 * 4) / 20)
    assert reward_mean_height([], 20) is None


def test_common_ground_is_the_shortest_of_all():
    slow = [make_row(step, seconds=10.0 * step, reward=0.0) for step in range(1, 4)]
    assert common_ground([make_run(), slow], warmup_steps=1) == CommonGround(samples=24, seconds=6)
    assert common_ground([[]], warmup_steps=1) is None
    assert steady_seconds(slow, warmup_steps=2) == [-10.0, 0.0, 10.0]


def test_a_run_that_never_left_warm_up_has_no_steady_figures():
    common = CommonGround(samples=32, seconds=0.0)
    found = run_figures("row", make_run(), warmup_steps=9, common=common)
    assert found.steady_samples_per_second is None
    assert found.step_seconds_median is None
    assert found.samples_per_second == 2.0
    with pytest.raises(ValueError, match="no optimizer step"):
        run_figures("row", [], warmup_steps=0, common=common)


def test_lines_of_evaluations_are_no_steps():
    lines = [{"step": 0, "evaluation/accuracy_share": 0.5}, *reversed(make_run())]
    assert [row["step"] for row in training_rows(lines)] == [1, 2, 3, 4]


def test_seeds_are_averaged_and_maxima_kept():
    one, other = figures(), figures(samples=24.0)
    joined = mean_figures([one, other])
    assert (joined.name, joined.seeds) == ("row", 2)
    assert joined.reward_at_samples == pytest.approx((1.0 + 0.8) / 2)
    assert joined.lag_max_steps == 3
    assert mean_figures([figures()]).completion_mean_tokens is None

import json

import pytest

from pipeline_rl_jax.rollouts.chunk_size_control import ChunkSizeController

SPEED = {128: 2e-3, 256: 1e-3, 512: 3e-3}  # seconds per token


def controller(**changes) -> ChunkSizeController:
    arguments = {"candidates": (128, 256, 512), "period_steps": 12, "trial_steps": 1, **changes}
    return ChunkSizeController(**arguments)


def run(subject: ChunkSizeController, num_steps: int, speed=SPEED, num_tokens=100) -> list[int]:
    """The sizes used."""
    used = []
    for _ in range(num_steps):
        used.append(subject.tokens)
        subject.observe(seconds=speed[used[-1]] * num_tokens, num_tokens=num_tokens)
    return used


def test_a_period_tries_every_candidate_on_different_steps_and_keeps_the_fastest():
    subject = controller()
    # Each candidate's first step compiles and is repeated.
    assert run(subject, 12) == [128, 128, 256, 256, 512, 512] + 6 * [256]
    assert run(subject, 12) == [128, 256, 512] + 9 * [256]
    slower = {**SPEED, 256: 9e-3}
    assert run(subject, 12, slower) == [128, 256, 512] + 9 * [128]


def test_several_trials_go_round_and_the_median_counts():
    subject = controller(period_steps=20, trial_steps=3)
    run(subject, 20)
    used = []
    # 256 is the fastest but for one step that was disturbed: its mean would be the slowest.
    for seconds in [2.0, 1.0, 3.0, 2.0, 50.0, 3.0, 2.0, 1.0, 3.0]:
        used.append(subject.tokens)
        subject.observe(seconds=seconds, num_tokens=1)
    assert used == 3 * [128, 256, 512]
    assert subject.tokens == 256
    assert subject.metrics()["chunk_size/256_seconds_per_token"] == 1.0


def test_the_compiling_step_is_not_measured():
    subject = controller(candidates=(128, 256), period_steps=10)
    used = []
    for seconds in [60.0, 1.0, 60.0, 2.0]:  # 128 is faster, both compile for a minute
        used.append(subject.tokens)
        subject.observe(seconds=seconds, num_tokens=1)
    assert used == [128, 128, 256, 256]
    assert subject.metrics() == {
        "chunk_size/tokens": 128.0,
        "chunk_size/chosen_tokens": 128.0,
        "chunk_size/128_seconds_per_token": 1.0,
        "chunk_size/256_seconds_per_token": 2.0,
    }


def test_speed_is_per_token_whatever_the_length_of_a_step():
    subject = controller(candidates=(128, 256), period_steps=10)
    for seconds, num_tokens in [(1.0, 1), (10.0, 1000), (1.0, 1), (5.0, 100)]:
        subject.observe(seconds=seconds, num_tokens=num_tokens)
    assert subject.tokens == 128


def test_a_step_without_tokens_repeats_the_trial():
    subject = controller()
    run(subject, 12)
    subject.observe(seconds=1.0, num_tokens=0)
    assert subject.tokens == 128


def test_equal_candidates_keep_the_one_in_use():
    subject = controller()
    run(subject, 12)
    even = dict.fromkeys(SPEED, 1e-3)
    assert run(subject, 12, even)[-1] == 256


def test_one_candidate_is_fixed():
    subject = controller(candidates=(64,), period_steps=1)
    assert run(subject, 5, {64: 1.0}) == 5 * [64]


def test_a_restored_controller_goes_on_where_the_first_was():
    first, second = controller(), controller()
    run(first, 14)  # in the second period, 128 tried and 256 tried
    second.restore(json.loads(json.dumps(first.snapshot())))
    assert second.tokens == 512
    assert run(second, 3) == [512, 512, 256]  # compiled anew, then measured, then the fastest
    other = controller(candidates=(256, 1024))
    other.restore(first.snapshot())
    assert other.metrics() == {"chunk_size/tokens": 256.0, "chunk_size/chosen_tokens": 256.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": ()}, "candidates"),
        ({"candidates": (128, 128)}, "different"),
        ({"candidates": (0, 128)}, "candidates"),
        ({"period_steps": 6}, r"period_steps \(6\)"),
        ({"trial_steps": 0}, r"trial_steps \(0\)"),
    ],
)
def test_settings_of_no_use_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        controller(**changes)

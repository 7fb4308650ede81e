import dataclasses

import pytest

from pipeline_rl_jax.records import Rollout, StopReason
from pipeline_rl_jax.telemetry.samples import SampleWriter, format_samples
from tests.fakes.rollouts import make_completion, make_prompt
from tests.fakes.settings import make_settings


def make_rollout(index=0, *, versions=4, stop_reason=StopReason.EOS):
    prompt = make_prompt(index, task="sums")
    completion = make_completion(
        prompt, [1, 2, 3], sample_index=index, versions=versions, stop_reason=stop_reason
    )
    return Rollout(
        completion=dataclasses.replace(completion, text=f" answer number {index}"),
        reward=0.5,
        reward_components={"correct": 1.0, "overlong": -0.5},
    )


def test_everything_a_person_asks_of_a_sample():
    text = format_samples([make_rollout(7)], step=12, num_samples=4)
    assert text == (
        "step 12: 1 of 1 completions\n"
        "\n"
        + "=" * 80
        + "\n"
        + "prompt 7, sample 7, task sums\n"
        + "reward 0.5  =  correct 1  overlong -0.5\n"
        + "3 tokens, ended by eos\n"
        + "weights of step 4\n"
        + "gold answer: 1\n"
        + "--- prompt\n"
        + "?\n"
        + "--- completion\n"
        + " answer number 7\n"
    )


def test_mixed_versions_and_truncation_are_told():
    rollout = make_rollout(versions=[5, 5, 8], stop_reason=StopReason.MAX_NEW_TOKENS)
    text = format_samples([rollout], step=1, num_samples=1)
    assert "weights of step 5 to 8 (2 versions)" in text
    assert "ended by max_new_tokens" in text


def test_samples_are_spread_over_the_batch():
    text = format_samples([make_rollout(i) for i in range(9)], step=1, num_samples=3)
    shown = [i for i in range(9) if f"answer number {i}\n" in text]
    assert shown == [0, 4, 8]


@pytest.mark.parametrize(("num_samples", "steps"), [(2, [1, 5, 10]), (0, [])])
def test_files_of_the_steps_asked_for(tmp_path, num_samples, steps):
    telemetry = make_settings(
        telemetry={"sample_completions": num_samples, "sample_every_steps": 5}
    ).telemetry
    writer = SampleWriter(telemetry, tmp_path / "samples")
    written = [writer.write(step, [make_rollout()]) for step in range(1, 12)]
    assert [path.name for path in written if path] == [f"step_{step:06d}.txt" for step in steps]
    assert writer.write(5, []) is None

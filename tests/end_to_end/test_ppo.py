"""PPO, online DPO and chosen chunk sizes in whole runs on the tiny model."""

import itertools
import math

import numpy as np
import pytest

from pipeline_rl_jax.checkpointing.store import restore_params
from pipeline_rl_jax.orchestrate import build
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.telemetry.schema import check_names
from pipeline_rl_jax.telemetry.workdir import open_workdir
from tests.fakes.tiny_run import read_metrics, tiny_config, write_tiny_model

VARIED = {  # a random model answers nothing right, and equal rewards teach nothing
    "rewards__correctness": "user",
    "rewards__user_function": "tests.fakes.reward_functions:even_token_sum",
    "evaluation__at_start": False,
    "evaluation__at_end": False,
    "trainer__learning_rate": 1e-2,
}
PPO = {
    "algorithm__loss": "ppo",
    "algorithm__baseline": "gae",
    "algorithm__group_size": 1,
    "algorithm__batch_normalise": True,
    "algorithm__value_coefficient": 1.0,
    "algorithm__value_clip": 0.2,
    "algorithm__aggregation": "token_mean",
    "algorithm__kl_coefficient": 0.1,
    "algorithm__kl_in": "reward",
    "algorithm__kl_estimator": "k1",
    "algorithm__truncated": "bootstrap",
    "trainer__epochs": 2,
    "trainer__minibatches": 2,
    "schedule__overcommit__start_groups": 4,
    "schedule__overcommit__max_groups": 4,
}
# What two runs that did the same may differ in.
OF_TIME = (
    "seconds",
    "per_second",
    "idle",
    "spans/",
    "waits/",
    "publication/",
    "host/",
    "flops",
    "rollouts/",
    "generation/",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def run(model, workdir, **changes) -> list[dict]:
    """The metrics of every optimizer step, each declared and finite."""
    settings = parse_settings(tiny_config(model, **(VARIED | changes)))
    assert build.run(settings, workdir=open_workdir(workdir)) == 0
    lines = [line for line in read_metrics(workdir) if "trainer/loss" in line]
    for line in lines:
        check_names(set(line) - {"step", "run_attempt", "unix_seconds"})
        assert all(math.isfinite(value) for value in line.values()), line
    return lines


def learned(line: dict) -> dict:
    """What a line says of the learning, nothing of the time."""
    return {
        name: value
        for name, value in line.items()
        if not any(part in name for part in OF_TIME)
        and not name.startswith(("overcommit/", "run", "step"))
    }


def test_four_models_on_devices_of_their_own_and_a_resume(model, tmp_path):
    changes = PPO | {
        "schedule__name": "oppo",
        "algorithm__critic": "model",
        "algorithm__kl_control": "adaptive",
        "algorithm__kl_target_nats": 1e-6,  # whatever the divergence is, it is far off
        "algorithm__kl_horizon_rollouts": 160,
        "meshes__trainer_devices": (0,),
        "meshes__generation_devices": (1,),
        "meshes__reference_devices": (2,),
        "meshes__critic_devices": (3,),
    }
    text = build.describe(parse_settings(tiny_config(model, **(VARIED | changes))))
    assert "critic AdamW moments" in text
    assert "2 epochs of 2 updates each" in text
    assert "lambda 0.95, critic: a model of its own" in text
    first = run(model, tmp_path, schedule__num_steps=3, **changes)
    assert [line["trainer/skipped_steps"] for line in first] == [0, 0, 0]
    assert first[0]["value/mean"] == 0.0  # its head starts at zero
    assert first[2]["value/mean"] != 0.0
    assert all(line["value/gradient_norm"] > 0 for line in first)
    params = restore_params(tmp_path / "checkpoints")
    assert "value_head" not in params  # the policy is exported alone
    lines = run(model, tmp_path, schedule__num_steps=5, **changes)
    coefficients = [line["kl_control/coefficient"] for line in lines]
    assert coefficients[0] == pytest.approx(0.1)
    # 16 of 160 rollouts, the error bounded by 0.2 either way: every step moves it by 2 %.
    for before, after in itertools.pairwise(coefficients):
        assert abs(after / before - 1) == pytest.approx(0.02, rel=1e-2)
    assert lines[3]["value/mean"] != 0.0  # the critic came back with the run


def test_oppo_without_overcommitment_is_plain_ppo_step_for_step(model, tmp_path):
    """Whatever the chunks are."""
    alone = {"schedule__overcommit__variant": "fixed", "schedule__overcommit__start_groups": 0}
    plain = run(
        model, tmp_path / "plain", **PPO, schedule__name="conventional", generation__slots=16
    )
    for name, chunk in (("whole", 8), ("chunked", 3)):
        other = run(
            model,
            tmp_path / name,
            **(PPO | alone),
            schedule__name="oppo",
            generation__slots=16,
            generation__tokens_per_chunk=chunk,
        )
        for left, right in zip(plain, other, strict=True):
            assert learned(left).keys() == learned(right).keys()
            for metric, value in learned(left).items():
                assert learned(right)[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["head", "model"])
def test_a_critic_that_reads_along_gives_the_values_of_whole_batches(model, tmp_path, critic):
    changes = PPO | {
        "algorithm__critic": critic,
        "algorithm__truncated": "train",
        "algorithm__reference_streaming": True,
        "schedule__name": "oppo",
        "schedule__overcommit__variant": "fixed",
        "schedule__overcommit__start_groups": 0,
        "generation__slots": 16,
        "generation__tokens_per_chunk": 3,
    }
    whole = run(model, tmp_path / "whole", **changes)
    streamed = run(model, tmp_path / "streamed", **changes, algorithm__value_streaming=True)
    assert whole[2]["value/mean"] != 0.0
    for left, right in zip(whole, streamed, strict=True):
        assert right["scoring/critic_streamed_tokens"] + right["scoring/critic_final_tokens"] > 0
        for metric, value in learned(left).items():
            if not metric.startswith("scoring/"):
                assert learned(right)[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


def test_online_dpo(model, tmp_path):
    lines = run(
        model,
        tmp_path,
        algorithm__loss="dpo",
        algorithm__baseline="none",
        schedule__name="oppo",
        schedule__num_steps=4,
        schedule__overcommit__start_groups=1,
        schedule__overcommit__max_groups=4,
    )
    assert lines[0]["dpo/loss_nats"] == pytest.approx(math.log(2), abs=1e-5)  # at the reference
    assert lines[0]["dpo/margin_nats"] == pytest.approx(0.0, abs=1e-4)
    assert all(1 <= line["dpo/pairs"] <= 4 for line in lines)
    assert all(line["trainer/gradient_norm"] > 0 for line in lines)
    assert abs(lines[-1]["dpo/margin_nats"]) > 1e-4


def test_chunk_sizes_are_tried_and_tokens_do_not_depend_on_them(model, tmp_path):
    changes = {"schedule__name": "conventional", "schedule__num_steps": 7}
    plain = run(model, tmp_path / "plain", **changes)
    lines = run(
        model,
        tmp_path / "chosen",
        generation__chunk_candidates=(2, 8),
        generation__chunk_period_steps=6,
        **changes,
    )
    assert [line["chunk_size/tokens"] for line in lines[:4]] == [2, 2, 8, 8]
    chosen = lines[4]["chunk_size/chosen_tokens"]
    assert chosen in (2, 8)
    assert [line["chunk_size/tokens"] for line in lines[4:6]] == [chosen, chosen]
    assert lines[6]["chunk_size/tokens"] == 2  # the next period begins with trials
    for left, right in zip(plain, lines, strict=True):
        assert right["reward/mean"] == left["reward/mean"]
        np.testing.assert_allclose(right["trainer/loss"], left["trainer/loss"], atol=1e-5)

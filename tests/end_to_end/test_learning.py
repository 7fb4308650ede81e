"""What can be asked for beside the default loss, in whole runs on the tiny model."""

import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline_rl_jax.checkpointing.store import restore_params
from pipeline_rl_jax.models.hf_export import save_params
from pipeline_rl_jax.orchestrate import build
from pipeline_rl_jax.orchestrate.export import export_params
from pipeline_rl_jax.settings import Settings, SettingsError
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.telemetry.schema import check_names
from pipeline_rl_jax.telemetry.workdir import open_workdir
from tests.fakes.tiny_engine import TINY
from tests.fakes.tiny_run import read_metrics, tiny_config, write_tiny_model

VARIED = {  # a random model answers nothing right, and equal rewards have no gradient
    "rewards__correctness": "user",
    "rewards__user_function": "tests.fakes.reward_functions:even_token_sum",
    "evaluation__at_start": False,
    "evaluation__at_end": False,
    "trainer__learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def settings_for(model, **changes) -> Settings:
    return parse_settings(tiny_config(model, **(VARIED | changes)))


def run(model, workdir, **changes) -> list[dict]:
    """The metrics of every optimizer step, each declared and finite."""
    assert build.run(settings_for(model, **changes), workdir=open_workdir(workdir)) == 0
    lines = [line for line in read_metrics(workdir) if "trainer/loss" in line]
    for line in lines:
        check_names(set(line) - {"step", "run_attempt", "unix_seconds"})
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["trainer/skipped_steps"] == 0
    return lines


def test_value_baseline_with_one_rollout_a_prompt(model, tmp_path):
    changes = {"algorithm__baseline": "value", "algorithm__group_size": 1}
    lines = run(model, tmp_path, schedule__num_steps=4, **changes)
    assert len(lines) == 4
    # Rewards are 0 or 1 and the head starts at zero: the first loss is half the mean of R.
    assert 0 < lines[0]["value/loss"] < 0.5
    assert lines[0]["value/explained_variance"] == pytest.approx(0.0, abs=1e-5)
    assert any(abs(line["value/explained_variance"]) > 1e-4 for line in lines[1:])
    params = restore_params(tmp_path / "checkpoints")
    assert np.abs(params["value_head"]["head_weight"]).max() > 0
    # The head is the trainer's own: the exported model is the language model alone.
    settings = settings_for(model, **changes)
    export_params(params, settings.model, directory=tmp_path / "exported", dtype="float32")
    names = load_file(tmp_path / "exported" / "model.safetensors").keys()
    assert names
    assert not [name for name in names if "value_head" in name or "head_weight" in name]
    # The same command again resumes, head and all.
    more = run(model, tmp_path, schedule__num_steps=6, **changes)
    assert [line["step"] for line in more] == [1, 2, 3, 4, 5, 6]


def test_kl_in_the_loss_starts_at_zero_and_is_to_the_start_after_a_resume(model, tmp_path):
    changes = {"algorithm__kl_coefficient": 0.1}
    lines = run(model, tmp_path, schedule__num_steps=2, **changes)
    assert abs(lines[0]["policy/kl_to_reference_nats"]) < 1e-5
    assert abs(lines[0]["policy/kl_to_reference_k3_nats"]) < 1e-5
    assert lines[1]["policy/kl_to_reference_k3_nats"] > 1e-4
    resumed = run(model, tmp_path, schedule__num_steps=3, **changes)[2]
    assert resumed["lag/max_steps"] == 0  # current and behaviour are one, the reference is not
    assert resumed["policy/kl_to_reference_k3_nats"] > 1e-4


def test_kl_in_the_reward_on_devices_of_its_own(model, tmp_path):
    lines = run(
        model,
        tmp_path,
        algorithm__kl_coefficient=0.5,
        algorithm__kl_in="reward",
        schedule__name="conventional",  # one step a round: the sampler is the policy in training
        algorithm__kl_estimator="k1",
        meshes__reference_devices=(2, 3),
        meshes__trainer_devices=(0,),
        meshes__generation_devices=(1,),
    )
    assert abs(lines[0]["reward/kl_penalty_mean"]) < 1e-4
    assert abs(lines[0]["policy/kl_to_reference_nats"]) < 1e-5
    for line in lines[1:]:
        assert abs(line["reward/kl_penalty_mean"]) > 1e-3
        # The host took the sum per rollout, the step the mean per token, of the same numbers.
        num_nats = line["policy/kl_to_reference_nats"] * line["batch/loss_tokens"]
        taken_off = line["reward/kl_penalty_mean"] * line["batch/rollouts"]
        assert taken_off == pytest.approx(0.5 * num_nats, rel=1e-2)


def test_any_checkpoint_may_be_the_reference(model, tmp_path):
    params = build.initial_params(
        model,
        TINY,
        settings_for(model).model,
        shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        seed=7,
    )
    save_params(params, TINY, directory=tmp_path / "other", sources=[model])
    changes = {"algorithm__kl_coefficient": 0.1, "schedule__num_steps": 1}
    (line,) = run(model, tmp_path / "run", algorithm__reference=str(tmp_path / "other"), **changes)
    assert line["policy/kl_to_reference_k3_nats"] > 1e-3
    settings = settings_for(model, **changes | {"algorithm__reference": str(tmp_path / "other")})
    text = build.describe(settings)
    assert "reference weights" in text
    assert f"KL to the reference ({tmp_path / 'other'})" in text
    settings = settings_for(model, **changes | {"algorithm__reference": "/no/such"})
    with pytest.raises(SettingsError, match=r"algorithm.reference \(/no/such\) is no such dir"):
        build.describe(settings)


def test_refill_keeps_batches_full_of_groups_that_teach(model, tmp_path):
    lines = run(
        model,
        tmp_path,
        algorithm__zero_variance="refill",
        algorithm__group_size=2,
        algorithm__max_refill_share=20.0,
    )
    assert len(lines) == 3
    assert all(line["batch/rollouts"] == 16 for line in lines)
    assert lines[-1]["drops/zero_variance_total_rollouts"] > 0
    assert sum(line["group/refused_groups"] for line in lines) > 0
    assert all(line["group/kept_unwillingly_groups"] == 0 for line in lines)
    assert sum(line["group/zero_variance_share"] for line in lines) > 0  # what was refused counts


def test_data_without_a_useful_group_does_not_stall_the_run(model, tmp_path):
    lines = run(
        model,
        tmp_path,
        algorithm__zero_variance="refill",
        algorithm__max_refill_share=1.0,
        rewards__user_function="tests.fakes.reward_functions:half_for_short",
    )
    assert len(lines) == 3
    assert lines[-1]["drops/zero_variance_total_rollouts"] > 0
    assert sum(line["group/kept_unwillingly_groups"] for line in lines) >= 3 * 4 - 4

"""Whole runs on the tiny model: the same parts, wires and files as a real one."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from pipeline_rl_jax.checkpointing.store import restore_params
from pipeline_rl_jax.orchestrate import build
from pipeline_rl_jax.settings import SettingsError
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.telemetry.schema import check_names
from pipeline_rl_jax.telemetry.workdir import open_workdir
from tests.fakes.tiny_run import read_metrics, tiny_config, write_tiny_model

SUMMARY_KEYS = {
    "accuracy_before",
    "accuracy_after",
    "optimizer_steps",
    "inflight_updates",
    "mixed_version_share",
    "lag_mean_steps",
    "lag_max_steps",
    "samples_per_second",
    "decode_tokens_per_second",
    "train_tokens_per_second",
    "train_seconds",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def run(model, workdir, **changes):
    settings = parse_settings(tiny_config(model, **changes))
    return build.run(settings, workdir=open_workdir(workdir))


def first_step(workdir):
    return next(line for line in read_metrics(workdir) if "trainer/loss" in line)


def test_a_run_leaves_everything_a_person_looks_for(model, tmp_path, capsys):
    assert run(model, tmp_path, telemetry__timeline=True, telemetry__tensorboard=True) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["optimizer_steps"], summary["finished"]) == (3, True)
    assert summary["samples"] == 48
    assert 0 <= summary["lag_mean_steps"] <= summary["lag_max_steps"] <= 2
    assert "in-flight updates" in capsys.readouterr().out
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    for line in lines:
        check_names(set(line) - {"step", "run_attempt", "unix_seconds"})
    assert "gold answer" in (tmp_path / "samples" / "step_000001.txt").read_text()
    assert list((tmp_path / "tensorboard").iterdir())
    timeline = (tmp_path / "trace.json").read_text()
    for name in ("decode_chunk", "weight_swap", "reward", "train_step"):
        assert name in timeline
    assert json.loads((tmp_path / "config.json").read_text())["schedule"]["num_steps"] == 3


def test_eight_devices_give_the_first_step_of_one(model, tmp_path):
    one, eight = tmp_path / "one", tmp_path / "eight"
    quiet = {
        "schedule__num_steps": 1,
        "evaluation__at_start": False,
        "evaluation__at_end": False,
        # A random model answers nothing right, and equal rewards have no gradient.
        "rewards__correctness": "user",
        "rewards__user_function": "tests.fakes.reward_functions:share_of_vowels",
    }
    run(model, one, meshes__generation_devices=(0,), **quiet)
    run(
        model,
        eight,
        meshes__trainer_devices=(0, 1, 2, 3),
        meshes__generation_devices=(4, 5, 6, 7),
        meshes__trainer__fsdp=2,
        meshes__trainer__tensor=2,
        meshes__generation__data=2,
        meshes__generation__tensor=2,
        **quiet,
    )
    for name in ("trainer/loss", "trainer/gradient_norm"):
        np.testing.assert_allclose(first_step(one)[name], first_step(eight)[name], atol=1e-4)
    assert first_step(one)["trainer/gradient_norm"] > 0


def test_sigterm_saves_and_the_same_command_resumes(model, tmp_path):
    changes = {"schedule__num_steps": 400, "evaluation__at_end": False}

    def terminate_after_a_step():
        deadline = time.monotonic() + 200
        path = tmp_path / "metrics.jsonl"
        while time.monotonic() < deadline:
            if path.exists() and '"trainer/loss"' in path.read_text():
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.05)

    threading.Thread(target=terminate_after_a_step, daemon=True).start()
    assert run(model, tmp_path, **changes) == 128 + signal.SIGTERM
    stopped = json.loads((tmp_path / "summary.json").read_text())
    step = stopped["optimizer_steps"]
    assert 1 <= step < 400
    assert not stopped["finished"]
    changes["schedule__num_steps"] = step + 2
    assert run(model, tmp_path, **changes) == 0
    steps = [line["step"] for line in read_metrics(tmp_path) if "trainer/loss" in line]
    assert steps == list(range(1, step + 3))
    resumed = json.loads((tmp_path / "summary.json").read_text())
    assert resumed["samples"] == 16 * (step + 2)
    assert restore_params(tmp_path / "checkpoints")["embedding"].shape == (264, 32)
    # A finished run is not trained further by the same command.
    assert run(model, tmp_path, **changes) == 0
    assert read_metrics(tmp_path)[-1]["step"] == step + 2


@pytest.mark.parametrize("schedule", ["conventional", "one_step_off"])
def test_the_baselines_run_on_the_same_parts(model, tmp_path, schedule):
    assert run(model, tmp_path, schedule__name=schedule, evaluation__at_start=False) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["mixed_version_share"] == 0
    assert summary["lag_max_steps"] == (0 if schedule == "conventional" else 1)


def test_data_that_ends_before_the_steps_do_ends_the_run_cleanly(model, tmp_path):
    changes = {
        "data__arithmetic__num_records": 11,
        "data__num_epochs": 1,
        "schedule__num_steps": 50,
        "evaluation__at_end": False,
    }
    assert run(model, tmp_path, **changes) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["optimizer_steps"] == 2
    assert not summary["finished"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__source": "/no/such/model"}, "model.source"),
        ({"generation__max_prompt_tokens": 300, "generation__prefill_buckets": (300,)}, "context"),
        ({"meshes__trainer_devices": (0, 1, 2), "meshes__generation_devices": (3,)}, "fsdp"),
        ({"generation__max_prompt_tokens": 8, "generation__prefill_buckets": (8,)}, "too_long"),
        ({"rewards__correctness": "user", "rewards__user_function": "no.module:f"}, "no.module"),
    ],
)
def test_what_cannot_work_is_one_line_before_any_training(model, tmp_path, changes, message):
    changes = {"trainer__tokens_per_row": 512, **changes}
    with pytest.raises(SettingsError, match=message) as error:
        run(model, tmp_path, **changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_training_that_comes_to_nothing_ends_with_the_good_checkpoints_kept(model, tmp_path):
    changes = {
        "trainer__learning_rate": 1e30,
        "schedule__num_steps": 20,
        "checkpointing__every_steps": 1,
        "checkpointing__max_to_keep": 2,
        "evaluation__at_start": False,
    }
    with pytest.raises(SettingsError, match=r"lower trainer.learning_rate.* checkpoint") as error:
        run(model, tmp_path, **changes)
    losses = [line["trainer/loss"] for line in read_metrics(tmp_path) if "trainer/loss" in line]
    assert losses[-5:] == [None] * 5
    num_good = len(losses) - 5
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == list(range(max(1, num_good - 1), num_good + 1))
    assert f"step {num_good} has the weights that were tried in vain" in str(error.value)


def test_a_reward_that_always_fails_ends_the_run(model, tmp_path):
    changes = {
        "rewards__correctness": "user",
        "rewards__user_function": "tests.fakes.reward_functions:unreachable_service",
        "evaluation__at_start": False,
    }
    with pytest.raises(SettingsError, match="256 of them for user_function_error") as error:
        run(model, tmp_path, **changes)
    assert "\n" not in str(error.value)


def test_evaluation_prompts_that_are_too_long_are_one_line(model, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"problem": "x" * 500, "answer": "1"}))
    with pytest.raises(SettingsError, match=r"generation\.max_prompt_tokens"):
        run(model, tmp_path / "run", evaluation__path=str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__tokenizer": "/no/such"}, r"model.tokenizer \(/no/such\)"),
        ({"evaluation__path": "/no.jsonl"}, r"evaluation.path \(/no.jsonl\) names no file"),
        ({"data__source": "files", "data__path": "/no.jsonl"}, r"data.path \(/no.jsonl\)"),
    ],
)
def test_a_dry_run_refuses_paths_that_lead_nowhere(model, changes, message):
    with pytest.raises(SettingsError, match=message):
        build.describe(parse_settings(tiny_config(model, **changes)))


def test_dry_run_text(model):
    text = build.describe(parse_settings(tiny_config(model)))
    for part in ("27,168 parameters", "generation: data=1, tensor=1", "KV cache", "16 rollouts"):
        assert part in text

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from configs import train_reward
from pipeline_rl_jax.models.hf_export import WeightFormat, save_params
from pipeline_rl_jax.models.hf_reward import has_score_head, read_reward_config
from pipeline_rl_jax.models.loading import random_params
from pipeline_rl_jax.orchestrate.reward_training import (
    RewardTraining,
    parse_reward_training,
    run_reward_training,
)
from pipeline_rl_jax.settings import SettingsError
from pipeline_rl_jax.telemetry.workdir import open_workdir
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer
from tests.fakes.tiny_training import TINY


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A language model of random weights with a tokenizer of bytes."""
    root = tmp_path_factory.mktemp("model")
    config = dataclasses.replace(TINY, vocabulary_size=264)
    save_params(
        random_params(config, seed=0, dtype="float32"),
        config,
        directory=root / "model",
        sources=[],
        weight_format=WeightFormat(dtype="float32"),
    )
    write_tiny_tokenizer(root / "model")
    return root / "model"


def _write_pairs(path, count: int):
    """Answers of letters; people like those with an exclamation mark."""
    generator = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(count):
            liked, other = ("".join(generator.choice(list("abcdef"), 6)) for _ in range(2))
            record = {"question": f"{number}?", "response_j": liked[:-1] + "!", "response_k": other}
            file.write(json.dumps(record) + "\n")
        long = {"question": "?", "response_j": "!" * 80, "response_k": "a"}
        file.write(json.dumps(long) + "\n")
    return path


def _config(model, files):
    config = train_reward.get_config()
    config.seed = 1
    config.model.update(source=str(model), compute_dtype="float32", remat="none")
    config.model.save_dtype = "float32"
    config.data.update(files=str(files), eval_pairs=41, max_tokens=40)
    config.trainer.update(num_steps=12, batch_pairs=16, learning_rate=5e-3, warmup_steps=2)
    return config


@pytest.mark.slow
def test_a_run_from_files_to_a_model_that_is_right_more_often(model, tmp_path):
    settings = parse_reward_training(_config(model, _write_pairs(tmp_path / "p.jsonl", 240)))
    workdir, lines = open_workdir(tmp_path / "run"), []
    summary = run_reward_training(settings, workdir=workdir, show=lines.append)
    assert lines[0] == "200 pairs to train on, 40 held out, 1 too long"
    assert "has no score head: a new one" in lines[1]
    assert any(line.startswith("step 12 of 12  loss ") for line in lines)
    assert summary.accuracy_before < 0.8
    assert summary.accuracy_after > 0.9
    assert json.loads(workdir.summary.read_text()) == dataclasses.asdict(summary)
    metrics = [json.loads(line) for line in workdir.metrics.read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert metrics[-1]["reward_model/loss"] == summary.last_loss
    written = workdir.root / "model"
    assert has_score_head(written)
    assert read_reward_config(written) == read_reward_config(model)
    assert (written / "tokenizer.json").is_file()
    with pytest.raises(SettingsError, match="already exists"):
        run_reward_training(settings, workdir=workdir, show=lines.append)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("data", {"eval_pairs": 9}, r"data\.eval_pairs \(9\) must leave some of the 5 pairs"),
        ("data", {"max_tokens": 200}, r"data\.max_tokens \(200\) is more than .* context of 128"),
        ("data", {"too_long": "fail"}, r"data\.max_tokens \(40\) is less than the 10\d tokens"),
        ("trainer", {"batch_pairs": 12}, r"batch_pairs \(12\) must be a multiple of the 8 dev.*16"),
        ("model", {"source": "./none"}, r"model\.source \(./none\) is no such directory"),
    ],
)
def test_mistakes_of_model_and_data_are_one_line(model, tmp_path, section, changes, message):
    config = _config(model, _write_pairs(tmp_path / "p.jsonl", 4))
    config.data.eval_pairs = 2
    config[section].update(changes)
    with pytest.raises(SettingsError, match=message) as caught:
        run_reward_training(
            parse_reward_training(config), workdir=open_workdir(tmp_path / "run"), show=print
        )
    assert len(caught.value.problems) == 1
    assert "\n" not in caught.value.problems[0]


def test_every_mistake_of_the_settings_is_told():
    config = train_reward.get_config()
    config.trainer.batch_pairs = 0
    config.trainer.learning_rate = -1.0
    config.trainer.warmup_steps = -1
    config.data.eval_pairs = 0
    with pytest.raises(SettingsError) as caught:
        parse_reward_training(config)
    told = "\n".join(caught.value.problems)
    for path in ("model.source", "data.files", "data.eval_pairs", "trainer.batch_pairs (0)"):
        assert path in told
    assert "trainer.learning_rate (-1.0) must be above 0" in told
    assert "trainer.warmup_steps (-1) must be 0 or more" in told
    assert len(caught.value.problems) == 6


def test_a_negative_number_of_pairs_is_told_once():
    config = _config("model", "pairs.jsonl")
    config.data.eval_pairs = -1
    config.trainer.learning_rate = math.inf
    with pytest.raises(SettingsError) as caught:
        parse_reward_training(config)
    assert caught.value.problems == (
        "data.eval_pairs (-1) must be 1 or more when data.eval_files is empty",
        "trainer.learning_rate (inf) must be above 0, and finite",
    )


def test_training_that_is_not_finite_ends_in_one_line(model, tmp_path):
    config = _config(model, _write_pairs(tmp_path / "p.jsonl", 60))
    config.trainer.update(learning_rate=1e30, num_steps=6)
    with pytest.raises(SettingsError, match=r"is NaN or infinite.*learning_rate \(1e\+30\)"):
        run_reward_training(
            parse_reward_training(config), workdir=open_workdir(tmp_path / "run"), show=print
        )
    assert not (tmp_path / "run" / "model").exists()


def test_settings_are_read_by_the_rules_of_all_settings():
    config = train_reward.get_config().to_dict()
    config["trainer"]["learning_rate"] = "fast"
    del config["seed"]
    config["data"]["colour"] = 1
    config["trainer"]["epsilon"] = 1e-8
    with pytest.raises(SettingsError) as caught:
        parse_reward_training(config)
    told = "\n".join(caught.value.problems)
    assert "trainer.learning_rate ('fast') must be a number" in told
    assert "seed is missing" in told
    assert "data.colour is not a setting" in told
    assert "trainer.epsilon is not a setting; trainer has num_steps, batch_pairs" in told
    assert {field.name for field in dataclasses.fields(RewardTraining)} == {
        *train_reward.get_config()
    }

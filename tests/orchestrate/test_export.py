from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from configs.base import get_config
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.transformer import abstract_params
from pipeline_rl_jax.orchestrate.export import export_params
from pipeline_rl_jax.settings import ModelSettings

QWEN2 = Path(__file__).parents[1] / "models" / "golden" / "qwen2"


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    shutil.copytree(QWEN2, directory)
    (directory / "tokenizer.json").write_text("the source's")
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 11]}')
    return directory


@pytest.fixture
def settings(source) -> ModelSettings:
    defaults = ModelSettings(**get_config().model.to_dict())
    return dataclasses.replace(defaults, source=str(source))


def _params(directory: Path):
    config = read_config(directory)
    sharding = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: sharding, abstract_params(config))
    return load_params(directory, config, shardings=shardings, dtype="float32")


def test_an_export_is_a_model_to_begin_a_run_from(tmp_path, source, settings):
    trained = jax.tree.map(lambda x: x + 0.5, _params(source))
    export_params(trained, settings, directory=tmp_path / "model", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, _params(tmp_path / "model"), trained)
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [3, 11]}
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "the source's"


def test_the_tokenizer_is_the_one_the_run_used(tmp_path, source, settings):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("another")
    chosen = dataclasses.replace(settings, tokenizer=str(tokenizer))
    export_params(_params(source), chosen, directory=tmp_path / "model", dtype="bfloat16")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "another"
    assert (tmp_path / "model" / "generation_config.json").is_file()

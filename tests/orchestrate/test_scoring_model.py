"""Which reward models a run takes, and what they read of a completion."""

import json

import jax
import numpy as np
import pytest

from pipeline_rl_jax.data.vocabulary import own_tokens
from pipeline_rl_jax.meshes import build_meshes
from pipeline_rl_jax.orchestrate.scoring_model import find_scoring_model
from tests.fakes.completions import make_text_completion
from tests.fakes.settings import make_settings
from tests.fakes.tiny_engine import TINY
from tests.fakes.tiny_run import write_tiny_model, write_tiny_reward_model


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("actor"))


@pytest.fixture(scope="module")
def scorer(actor, tmp_path_factory):
    return write_tiny_reward_model(tmp_path_factory.mktemp("scorer") / "model", actor)


def find(actor, source, *, meshes=None, **reward_model):
    settings = make_settings(
        reward_model={"source": str(source), **reward_model},
        generation={"max_prompt_tokens": 40, "max_new_tokens": 8},
        meshes=meshes or {},
    )
    built = build_meshes(settings.meshes, jax.devices())
    return find_scoring_model(settings, actor, policy=TINY, meshes=built), settings, built


def with_other_tokens(actor, directory):
    """The same model with two characters in each other's place."""
    write_tiny_reward_model(directory, actor)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    return directory


def test_without_a_source_there_is_none(actor):
    assert find(actor, "")[0] is None


@pytest.mark.parametrize("streaming", [True, False])
def test_a_model_of_the_same_tokens_reads_the_actors_ids(actor, scorer, streaming):
    model, settings, meshes = find(
        actor, scorer, streaming=streaming, meshes={"scoring_devices": (3,)}
    )
    assert model.tokens_of is own_tokens
    assert model.num_parameters == TINY.num_parameters + TINY.width
    params = model.load(settings, mesh=meshes.scoring)
    assert {device.id for leaf in jax.tree.leaves(params) for device in leaf.devices()} == {3}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert np.abs(params["score"]).max() > 0.1


def test_other_tokens_cannot_be_streamed_but_are_encoded_again(actor, tmp_path):
    other = with_other_tokens(actor, tmp_path / "other")
    with pytest.raises(ValueError, match=r"reward_model\.source .* another tokenizer") as error:
        find(actor, other)
    assert "set reward_model.streaming=False" in str(error.value)
    assert "\n" not in str(error.value)
    model, *_ = find(actor, other, streaming=False)
    completion = make_text_completion("ab", answer="")
    encoded = model.tokens_of(completion)
    assert encoded[-3:-1].tolist() == [ord("b"), ord("a")]  # the ids change places
    assert encoded.size == len("Question:ab") + 1  # and the end of sequence


def test_what_cannot_be_a_reward_model_is_one_line(actor, scorer, tmp_path):
    cases = [
        (tmp_path / "missing", {}, r"reward_model\.source"),
        (scorer, {"meshes": {"scoring_devices": (1, 2, 3)}}, r"meshes\.scoring_devices lists 3"),
    ]
    short = write_tiny_reward_model(tmp_path / "short", actor) / "config.json"
    short.write_text(json.dumps(json.loads(short.read_text()) | {"max_position_embeddings": 32}))
    message = "has a context of 32 tokens, the longest rollout is of 48"
    cases.append((short.parent, {}, message))
    for source, changes, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            find(actor, source, **changes)
        assert "\n" not in str(error.value)


def test_a_language_model_is_to_be_trained_first(tmp_path):
    from pipeline_rl_jax.models.hf_export import WeightFormat, save_params
    from pipeline_rl_jax.models.loading import random_params

    directory = tmp_path / "language"
    params = random_params(TINY, seed=0, dtype="float32")
    weights = WeightFormat(dtype="float32")
    save_params(params, TINY, directory=directory, weight_format=weights)
    with pytest.raises(ValueError, match=r"without a score head; train a .*train_reward\.py"):
        find(directory, directory)

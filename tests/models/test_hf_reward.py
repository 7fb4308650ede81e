from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_export import WeightFormat
from pipeline_rl_jax.models.hf_reward import (
    has_score_head,
    load_reward_params,
    read_reward_config,
    save_reward_params,
)
from pipeline_rl_jax.models.reward_model import abstract_reward_params, build_reward_model

FLOAT32 = WeightFormat(dtype="float32")


def _load(directory, *, seed=None):
    config = read_reward_config(directory)
    sharding = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: sharding, abstract_reward_params(config))
    params = load_reward_params(directory, config, shardings=shardings, dtype="float32", seed=seed)
    return config, params


@pytest.fixture
def saved(golden, tmp_path):
    """A reward model directory made from a language model."""
    config, params = _load(golden.directory, seed=0)
    directory = tmp_path / "reward"
    save_reward_params(
        params, config, directory=directory, source=golden.directory, weight_format=FLOAT32
    )
    return directory, config, params


def _edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_written_and_read_again_it_is_the_same(golden, saved):
    directory, config, params = saved
    again_config, again = _load(directory)
    assert again_config == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    np.testing.assert_array_equal(again["layers"]["gate"], golden.params["layers"]["gate"])
    assert has_score_head(directory)
    assert not has_score_head(golden.directory)
    raw = json.loads((directory / "config.json").read_text())
    assert raw["architectures"][0].endswith("ForSequenceClassification")
    assert len(raw["id2label"]) == 1


def test_a_new_head_is_small_and_drawn_from_the_seed(golden_qwen2):
    heads = [np.asarray(_load(golden_qwen2.directory, seed=seed)[1]["score"]) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(heads[0], heads[1])
    assert not np.array_equal(heads[0], heads[2])
    assert 0.01 < heads[0].std() < 0.03


def test_a_language_model_is_no_reward_model_until_it_is_trained(golden_qwen2):
    with pytest.raises(ValueError, match=r"missing: score\.weight") as caught:
        _load(golden_qwen2.directory)
    assert "\n" not in str(caught.value)


def test_a_reward_model_is_no_policy(saved):
    with pytest.raises(ValueError, match=r"ForSequenceClassification.* is not supported"):
        read_config(saved[0])


def test_a_reward_model_must_have_its_own_head_whatever_the_seed(golden_qwen2, tmp_path):
    shutil.copytree(golden_qwen2.directory, tmp_path / "broken")
    _edit_config(tmp_path / "broken", architectures=["Qwen2ForSequenceClassification"])
    with pytest.raises(ValueError, match=r"missing: score\.weight"):
        _load(tmp_path / "broken", seed=0)


def test_more_than_one_label_and_other_families_are_refused(golden_qwen2, saved, tmp_path):
    _edit_config(saved[0], id2label={"0": "bad", "1": "good"})
    with pytest.raises(ValueError, match="id2label has 2 labels; a reward model has one"):
        read_reward_config(saved[0])
    shutil.copytree(golden_qwen2.directory, tmp_path / "other")
    _edit_config(tmp_path / "other", architectures=["GPT2ForSequenceClassification"])
    with pytest.raises(ValueError, match=r"GPT2ForSequenceClassification\) is not supported"):
        read_reward_config(tmp_path / "other")


def test_a_misshapen_head_is_named(golden_qwen2, tmp_path):
    config, params = _load(golden_qwen2.directory, seed=0)
    params["score"] = np.zeros((2, config.width), np.float32)
    with pytest.raises(ValueError, match=r"params score has shape \(2, 32\)"):
        save_reward_params(params, config, directory=tmp_path / "x", source=golden_qwen2.directory)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parity
def test_transformers_gives_the_same_scores(saved):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory, config, params = saved
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    assert theirs.config.num_labels == 1
    ids = np.random.default_rng(1).integers(1, config.vocabulary_size, (3, 20))
    model = nnx.merge(build_reward_model(config), params)
    scores = model.sequence_scores(ids, np.asarray([20, 13, 1]))
    for row, length in enumerate((20, 13, 1)):
        with torch.no_grad():
            expected = theirs(torch.tensor(ids[row : row + 1, :length])).logits.numpy()
        np.testing.assert_allclose(scores[row], expected[0, 0], atol=1e-5)


@pytest.mark.parity
def test_we_read_what_transformers_saves(golden_qwen2, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        golden_qwen2.directory, num_labels=1, dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path / "theirs")
    config, params = _load(tmp_path / "theirs")
    model = nnx.merge(build_reward_model(config), params)
    ids = np.arange(1, 13)[None]
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()[0, 0]
    np.testing.assert_allclose(model.sequence_scores(ids, np.asarray([12]))[0], expected, atol=1e-5)

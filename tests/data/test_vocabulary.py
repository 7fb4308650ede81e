from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.data.vocabulary import (
    check_same_vocabulary,
    encode_again,
    own_tokens,
    vocabulary_hash,
)
from pipeline_rl_jax.records import Completion, Prompt, StopReason
from tests.fakes.tiny_tokenizer import EOS_ID, write_tiny_tokenizer


def _changed(directory, change):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return directory


def _swap(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def test_only_what_ids_mean_counts(tmp_path):
    first = write_tiny_tokenizer(tmp_path / "first")
    second = write_tiny_tokenizer(tmp_path / "second")
    _changed(second, lambda content: content.update(normalizer={"type": "NFC"}))
    assert vocabulary_hash(first) == vocabulary_hash(second)
    check_same_vocabulary(first, second, setting="reward_model.source", way_out="-")


@pytest.mark.parametrize(
    "change", [_swap, lambda content: content["added_tokens"][0].update(content="<end>")]
)
def test_another_vocabulary_is_refused_in_one_line(tmp_path, change):
    actor = write_tiny_tokenizer(tmp_path / "actor")
    scorer = _changed(write_tiny_tokenizer(tmp_path / "scorer"), change)
    with pytest.raises(
        ValueError, match=r"reward_model\.source .* has another tokenizer"
    ) as caught:
        check_same_vocabulary(
            actor, scorer, setting="reward_model.source", way_out="set streaming to False"
        )
    assert str(caught.value).endswith("; set streaming to False")
    assert "\n" not in str(caught.value)


def test_a_unigram_vocabulary_is_a_list(tmp_path):
    content = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}
    hashes = set()
    for scores in ([-1.0, -2.0], [-3.0, -4.0]):
        for entry, score in zip(content["model"]["vocab"], scores, strict=True):
            entry[1] = score
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        hashes.add(vocabulary_hash(tmp_path))
    assert len(hashes) == 1


def test_a_directory_without_a_usable_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        vocabulary_hash(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer that can be read"):
        vocabulary_hash(tmp_path)


@pytest.mark.parametrize(
    ("reason", "end"), [(StopReason.EOS, [EOS_ID]), (StopReason.MAX_NEW_TOKENS, [])]
)
def test_the_text_of_one_model_as_ids_of_another(tmp_path, reason, end):
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    prompt = Prompt(prompt_id=0, token_ids=np.asarray([7, 8]), text="Q:", answer="")
    completion = Completion(
        prompt=prompt,
        sample_index=0,
        token_ids=np.asarray([9]),
        logprobs=np.zeros(1, np.float32),
        weight_versions=np.zeros(1, np.int32),
        stop_reason=reason,
        text=" é",
    )
    assert encode_again(completion, tokenizer).tolist() == [*"Q: é".encode(), *end]
    assert own_tokens(completion).tolist() == [7, 8, 9]

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline_rl_jax.data.preferences import (
    PairWriter,
    PreferencePair,
    TokenPair,
    fitting_pairs,
    read_preference_files,
)
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from tests.fakes.tiny_tokenizer import EOS_ID, write_tiny_tokenizer


def _write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_both_layouts_are_recognised_record_by_record(tmp_path):
    path = _write(
        tmp_path / "pairs.jsonl",
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "id": 7},
        {"question": "Why?", "response_j": "Because.", "response_k": "No.", "qid": 3},
    )
    assert read_preference_files("data.files", path) == [
        PreferencePair(prompt="2+2?", chosen="4", rejected="5"),
        PreferencePair(prompt="Why?", chosen="Because.", rejected="No."),
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"line 2, is no .* fields are prompt, chosen; wanted are"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "chosen must be a string, not a list"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same text"),
        ([1], "it is a list, not an object"),
    ],
)
def test_what_is_no_pair_is_named_with_its_line(tmp_path, record, message):
    good = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    path = _write(tmp_path / "pairs.jsonl", good, record)
    with pytest.raises(ValueError, match=message) as caught:
        read_preference_files("data.files", path)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no pair"):
        read_preference_files("data.files", _write(tmp_path / "pairs.jsonl"))


def test_prompt_and_answer_are_encoded_apart_and_end(tmp_path):
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    writer = PairWriter(tokenizer, prompt_format="Q {prompt}{}:")
    pair = writer.write(PreferencePair(prompt="{x}", chosen="A", rejected="BC"))
    prompt = list(b"Q {x}{}:")
    assert pair.chosen.tolist() == [*prompt, *b"A", EOS_ID]
    assert pair.rejected.tolist() == [*prompt, *b"BC", EOS_ID]
    with pytest.raises(ValueError, match=r"data\.prompt_format \('Q:'\) must contain \{prompt\}"):
        PairWriter(tokenizer, prompt_format="Q:")


def test_pairs_that_do_not_fit_are_dropped_or_refused_but_never_cut():
    def pair(first, second):
        return TokenPair(np.zeros(first, np.int32), np.zeros(second, np.int32))

    pairs = [pair(3, 5), pair(6, 2), pair(2, 2)]
    kept = fitting_pairs(pairs, max_tokens=5, drop=True)
    assert [each.num_tokens for each in kept] == [5, 2]
    with pytest.raises(ValueError, match=r"data\.max_tokens \(5\) is less than the 6 tokens"):
        fitting_pairs(pairs, max_tokens=5, drop=False)
    with pytest.raises(ValueError, match="less than every one of 3 pairs"):
        fitting_pairs(pairs, max_tokens=1, drop=True)

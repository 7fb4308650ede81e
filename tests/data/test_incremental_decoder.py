import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_rl_jax.data.incremental_decoder import IncrementalDecoder
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from tests.fakes.tiny_tokenizer import EOS_ID, write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("model")))


def test_a_character_appears_when_its_last_byte_does(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.extend([byte]) for byte in "a€b".encode()]
    assert pieces == ["a", "", "", "€", "b"]
    assert decoder.text == "a€b"


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 20), max_size=12))
@settings(max_examples=40)
def test_pieces_join_to_the_whole_however_they_are_cut(tokenizer, text, cuts):
    ids = list(text.encode())
    decoder = IncrementalDecoder(tokenizer)
    pieces = []
    for cut in [*cuts, len(ids)]:
        pieces.append(decoder.extend(ids[:cut]))
        ids = ids[cut:]
    assert "".join(pieces) == decoder.text == text


def test_a_long_chunk_that_ends_within_a_character(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    ids = ("x" * 50 + "€").encode()
    assert decoder.extend(ids[:-1]) == "x" * 50
    assert decoder.extend(ids[-1:]) == "€"


def test_special_tokens_leave_no_text(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.extend([ord("a"), EOS_ID, ord("b"), EOS_ID]) == "ab"


def test_bytes_that_are_no_text_do_not_hold_back_what_follows(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.extend([0xFF] * 40).startswith("\ufffd" * 16)
    assert decoder.extend(b"stop here").endswith("stop here")


def test_nothing_gives_nothing(tokenizer):
    assert IncrementalDecoder(tokenizer).extend([]) == ""

import concurrent.futures
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from pipeline_rl_jax.data.tokenizer import load_tokenizer
from tests.fakes.tiny_tokenizer import (
    ASSISTANT_ID,
    END_ID,
    EOS_ID,
    USER_ID,
    VOCABULARY_SIZE,
    write_tiny_tokenizer,
)


@pytest.fixture
def directory(tmp_path):
    return write_tiny_tokenizer(tmp_path / "model")


def change_json(path, **changes):
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**values, **changes}))


def test_bytes_are_their_own_ids(directory):
    ids = load_tokenizer(directory).encode("A é")
    assert ids.dtype == np.int32
    assert ids.tolist() == [65, 32, 0xC3, 0xA9]


def test_special_tokens_written_in_a_text_become_their_ids(directory):
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("<|user|>hi<|end|>")
    assert ids.tolist() == [USER_ID, ord("h"), ord("i"), END_ID]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>hi<|end|>"


def test_empty_text_and_ids_beyond_the_vocabulary(directory):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode(np.array([72, VOCABULARY_SIZE + 5, 105], np.int32)) == "Hi"


@given(text=st.text())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_decode_inverts_encode(directory, text):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_file_that_names_an_end_is_heard(directory):
    assert load_tokenizer(directory).eos_token_ids == (EOS_ID, END_ID)
    change_json(directory / "config.json", eos_token_id=7)
    assert set(load_tokenizer(directory).eos_token_ids) == {EOS_ID, END_ID, 7}


def test_one_end_as_a_number_in_generation_config(directory):
    change_json(directory / "generation_config.json", eos_token_id=END_ID)
    assert load_tokenizer(directory).eos_token_ids == (END_ID, EOS_ID)


@pytest.mark.parametrize("token", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
def test_end_named_by_special_tokens_map_only(directory, token):
    (directory / "generation_config.json").unlink()
    change_json(directory / "tokenizer_config.json", eos_token=None)
    change_json(directory / "special_tokens_map.json", eos_token=token)
    assert load_tokenizer(directory).eos_token_ids == (END_ID,)


def test_no_end_at_all_is_an_error(directory):
    (directory / "generation_config.json").unlink()
    change_json(directory / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match=r"names no token that ends.*generation_config\.json"):
        load_tokenizer(directory)


@pytest.mark.parametrize("value", ["x", [1.5], [True], -1, ["</s>"]])
def test_an_end_that_is_no_id_is_an_error(directory, value):
    change_json(directory / "generation_config.json", eos_token_id=value)
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id .* a token id"):
        load_tokenizer(directory)


def test_an_end_that_the_tokenizer_does_not_know_is_an_error(directory):
    change_json(directory / "tokenizer_config.json", eos_token="</s>")
    with pytest.raises(ValueError, match=r"eos_token \(</s>\).*not in its tokenizer\.json"):
        load_tokenizer(directory)


def test_truncation_and_padding_saved_in_the_file_are_ignored(directory):
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(max_length=4, direction="left")
    backend.enable_padding(length=32, pad_id=257)
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("0123456789").tolist() == list(b"0123456789")
    assert tokenizer.encode("01").tolist() == list(b"01")


def test_one_tokenizer_serves_many_threads(directory):
    tokenizer = load_tokenizer(directory)
    texts = [f"{number} äöü " * 20 for number in range(200)]

    def round_trip(text):
        return tokenizer.decode(tokenizer.encode(text))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == texts


def test_prefix_is_what_the_tokenizer_puts_first(directory):
    assert load_tokenizer(directory).prefix_text == ""
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|user|> $A <eos>", special_tokens=[("<|user|>", USER_ID), ("<eos>", EOS_ID)]
    )
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.prefix_text == "<|user|>"
    assert tokenizer.encode("hi").tolist() == [ord("h"), ord("i")]


def test_vocabulary_size_counts_special_tokens(directory):
    assert load_tokenizer(directory).vocabulary_size == VOCABULARY_SIZE


def test_chat_is_rendered_with_the_special_tokens_once(directory):
    tokenizer = load_tokenizer(directory)
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|user|>hi<|end|><|assistant|>"
    assert tokenizer.encode(text).tolist() == [USER_ID, *b"hi", END_ID, ASSISTANT_ID]


def test_chat_without_a_template_is_an_error(directory):
    change_json(directory / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValueError, match=r"data\.template \(chat\).*data\.template=plain"):
        load_tokenizer(directory).render_chat([{"role": "user", "content": "hi"}])


def test_missing_and_broken_files_are_named(directory, tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path / "nowhere")
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not JSON"):
        load_tokenizer(directory)
    (directory / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"must hold a JSON object, not a list"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer that can be read"):
        load_tokenizer(directory)

import json

from hypothesis import given
from hypothesis import strategies as st

from pipeline_rl_jax.data.character_tokenizer import num_tokens, write_character_tokenizer
from pipeline_rl_jax.data.tokenizer import load_tokenizer

ALPHABET = "\n 01+=a"


def make_tokenizer(directory):
    write_character_tokenizer(directory, ALPHABET)
    return load_tokenizer(directory)


def test_an_id_is_the_place_in_the_alphabet(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    assert tokenizer.encode("a+1\n").tolist() == [6, 4, 3, 0]
    assert tokenizer.decode([2, 1, 2]) == "0 0"


@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_every_text_of_the_alphabet_comes_back(tmp_path_factory, text):
    directory = tmp_path_factory.getbasetemp() / "character_tokenizer"
    directory.mkdir(exist_ok=True)
    if not (directory / "tokenizer.json").exists():
        write_character_tokenizer(directory, ALPHABET)
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_the_special_tokens_follow_the_alphabet(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    assert list(tokenizer.eos_token_ids) == [7]
    assert tokenizer.encode("é").tolist() == [9]
    assert num_tokens(ALPHABET) == 10
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 7, "pad_token_id": 8}

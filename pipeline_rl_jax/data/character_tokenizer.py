"""Writes the files of a tokenizer with one token per character.

Owns those files; `tokenizer.py` reads them like any other checkpoint's. For small models made on
the spot, whose texts use a known alphabet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

_EOS, _PAD, _UNKNOWN = "<eos>", "<pad>", "<unknown>"


def write_character_tokenizer(directory: Path, alphabet: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json.

    Ids are the places in `alphabet`; after them come `<eos>`, `<pad>` and `<unknown>`, which
    stands for every other character.
    """
    vocabulary = {character: place for place, character in enumerate(alphabet)}
    special = {name: len(alphabet) + place for place, name in enumerate((_EOS, _PAD, _UNKNOWN))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary | special, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _EOS,
        "pad_token": _PAD,
        "unk_token": _UNKNOWN,
    }
    _write_json(directory / "tokenizer_config.json", config)
    generation = {"eos_token_id": special[_EOS], "pad_token_id": special[_PAD]}
    _write_json(directory / "generation_config.json", generation)


def num_tokens(alphabet: str) -> int:
    """Size of the vocabulary that `write_character_tokenizer` makes of an alphabet."""
    return len(alphabet) + 3


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

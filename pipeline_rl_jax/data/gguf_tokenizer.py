"""Tokenizer files of a Hugging Face directory from a GGUF file's metadata.

Owns byte-level BPE as llama.cpp stores it: tokens, merges, token types, special ids, chat template.
The weights are converted in `models/gguf_import.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL, _USER_DEFINED = int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)
# Tokens that end a text whatever the metadata calls the end of sequence: llama.cpp stops at them
# too. A prompt without chat template ends a document rather than a turn.
_END_OF_TEXT_TOKENS = ("<|endoftext|>",)
_TOKEN_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "pad_token": "padding",
    "unk_token": "unknown",
}


def write_tokenizer_files(gguf_path: Path, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into `directory`.

    `directory` exists; files of these names are replaced. ValueError when the file's tokenizer is
    not byte-level BPE with a known way of splitting text.
    """
    fields = _read_fields(gguf_path)
    tokens: Sequence[str] = fields["tokens"]
    tokenizer = _build_tokenizer(fields, gguf_path)
    special = {
        role: int(fields[f"{key}_token_id"])
        for role, key in _TOKEN_ROLES.items()
        if f"{key}_token_id" in fields
    }
    if "eos_token" not in special:
        raise ValueError(f"{gguf_path} names no end-of-sequence token")
    config: dict[str, Any] = {
        # Any other class would make transformers rebuild the splitting rules from its own name.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{role: tokens[token_id] for role, token_id in special.items()},
    }
    if "chat_template" in fields:
        config["chat_template"] = fields["chat_template"]
    ends = [special["eos_token"]]
    ends += [i for i, token in enumerate(tokens) if token in _END_OF_TEXT_TOKENS and i not in ends]
    generation = {
        f"{role}_id": token_id for role, token_id in special.items() if role != "unk_token"
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "generation_config.json", {**generation, "eos_token_id": ends})


def _read_fields(gguf_path: Path) -> dict[str, Any]:
    """The `tokenizer.*` metadata, keys without their prefix."""
    try:
        reader = gguf.GGUFReader(gguf_path)
    except (ValueError, OSError, IndexError) as error:
        raise ValueError(f"{gguf_path} is not a readable GGUF file ({error})") from error
    fields = {
        name.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }
    missing = [
        key for key in ("model", "pre", "tokens", "merges", "token_type") if key not in fields
    ]
    if missing:
        raise ValueError(f"{gguf_path} lacks the tokenizer metadata {', '.join(missing)}")
    return fields


def _build_tokenizer(fields: Mapping[str, Any], gguf_path: Path) -> Tokenizer:
    if fields["model"] != "gpt2" or fields["pre"] != "smollm":
        raise ValueError(
            f"{gguf_path} has the tokenizer {fields['model']}/{fields['pre']}; only gpt2/smollm "
            "can be converted; give a Hugging Face directory as model.tokenizer"
        )
    tokens, types = fields["tokens"], fields["token_type"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=kind == _CONTROL, normalized=False)
            tokenizer.add_special_tokens([added]) if kind == _CONTROL else tokenizer.add_tokens(
                [added]
            )
    return tokenizer


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")

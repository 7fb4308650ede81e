"""Text to token ids and back, exactly as a checkpoint's `tokenizer.json` says.

Owns loading from a Hugging Face directory, the set of end-of-sequence ids and thread safety. The
file is used as it is: transformers' AutoTokenizer rebuilds some tokenizers by class name, with
other ids. Decoding while tokens still arrive is `incremental_decoder.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from pipeline_rl_jax.data.chat_template import ChatTemplate, find_template_source

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A tokenizer that never truncates or pads, safe to share between threads.

    `eos_token_ids` holds every id that ends a completion; `vocabulary_size` is the largest id plus
    one. `prefix_text` is what the tokenizer itself puts before a text ("", or a token that begins
    sequences); `encode` leaves it to the caller.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        chat_template: ChatTemplate | None,
        origin: Path,
    ) -> None:
        # A tokenizer.json may carry the truncation and padding of whoever saved it.
        backend.no_truncation()
        backend.no_padding()
        # The backend fails with "Already borrowed" when one thread changes what another reads.
        self._lock = threading.Lock()
        self._backend = backend
        self._chat_template = chat_template
        self._origin = origin
        self.eos_token_ids = eos_token_ids
        self.vocabulary_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.prefix_text = self._find_prefix_text()

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `[T]`. Special tokens written in it become their ids; none is
        added."""
        with self._lock:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def decode(
        self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True
    ) -> str:
        """Text of the ids. Ids outside the vocabulary (a padded model's) decode to nothing."""
        ids = np.asarray(token_ids, np.int64).tolist()
        with self._lock:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the model's chat template writes it, up to the assistant's turn.

        ValueError when the checkpoint has no chat template.
        """
        if self._chat_template is None:
            raise ValueError(
                f"data.template (chat) needs a chat template, and {self._origin} has none in "
                "tokenizer_config.json, chat_template.jinja or chat_template.json; use "
                "data.template=plain, or model.tokenizer of an instruction-tuned model"
            )
        return self._chat_template.render(messages)

    def _find_prefix_text(self) -> str:
        plain = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        starts = range(len(full) - len(plain) + 1)
        start = next((s for s in starts if full[s : s + len(plain)] == plain), 0)
        return self._backend.decode(full[:start], skip_special_tokens=False)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory.

    ValueError when `tokenizer.json` is missing or unreadable, or no file names a token that ends a
    completion.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"model.tokenizer ({directory}) holds no tokenizer.json; give a directory that does, "
            "or save the model's tokenizer there with transformers' save_pretrained"
        )
    backend = _read_backend(path)
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _read_json(directory / "special_tokens_map.json"))
    source = find_template_source(directory, [_read_json(directory / "chat_template.json"), config])
    template = None
    if source is not None:
        template = ChatTemplate(source, special_tokens, origin=directory)
    return Tokenizer(
        backend,
        eos_token_ids=_eos_token_ids(directory, backend, special_tokens),
        chat_template=template,
        origin=directory,
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer that can be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """`{"eos_token": "<eos>", ...}`; the first file that names a token wins."""
    tokens: dict[str, str] = {}
    for config in configs:
        for name in _SPECIAL_TOKEN_NAMES:
            value = config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str) and content:
                tokens.setdefault(name, content)
    return tokens


def _eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    """Every id that some file of the checkpoint calls an end of sequence, each once."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        ids += _as_ids(value, origin=directory / name)
    token = special_tokens.get("eos_token")
    if token is not None:
        token_id = backend.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"eos_token ({token}) of {directory} is not in its tokenizer.json; the files "
                "belong to different models"
            )
        ids.append(token_id)
    if not ids:
        raise ValueError(
            f"{directory} names no token that ends a completion; put eos_token_id into its "
            "generation_config.json"
        )
    return tuple(dict.fromkeys(ids))


def _as_ids(value: object, *, origin: Path) -> list[int]:
    """The ids of a number, a list or null."""
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(
                f"{origin}: eos_token_id ({value!r}) must be a token id, or a list of them"
            )
    return ids

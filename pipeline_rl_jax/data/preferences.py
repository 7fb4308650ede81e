"""Preference pairs: a prompt, an answer that people liked, and one they liked less.

Owns the layouts of their files and the pair as token ids. Paths and parsing are `files.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from pipeline_rl_jax.data.files import expand_paths, read_records
from pipeline_rl_jax.data.tokenizer import Tokenizer

# Names of (prompt, chosen, rejected) by layout; Stack-Exchange-paired has the better answer as j.
_LAYOUTS: Mapping[str, tuple[str, str, str]] = {
    "prompt/chosen/rejected": ("prompt", "chosen", "rejected"),
    "Stack-Exchange-paired": ("question", "response_j", "response_k"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Texts of one comparison."""

    prompt: str
    chosen: str
    rejected: str


class TokenPair(NamedTuple):
    """Prompt and answer as ids, [T] int32 each."""

    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Of the longer one."""
        return max(self.chosen.size, self.rejected.size)


def read_preference_files(setting: str, paths: str) -> list[PreferencePair]:
    """Pairs of every .jsonl, .json or .parquet file in `paths`, in order.

    `setting` names `paths` in errors. ValueError with file and line for what is not a pair.
    """
    pairs: list[PreferencePair] = []
    for path in expand_paths(setting, paths):
        count = len(pairs)
        for place, record in read_records(path):
            try:
                pairs.append(_read_pair(record))
            except ValueError as error:
                raise ValueError(f"{path}, {place}, is no preference pair: {error}") from error
        if len(pairs) == count:
            raise ValueError(f"{setting} ({path}) holds no pair; remove it from the list")
    return pairs


class PairWriter:
    """Writes pairs as token ids: `prompt_format`, the answer, an end of sequence.

    Prompt and answer are encoded apart and joined, as an actor's prompt and completion are.
    ValueError when the format has no place for the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt_format: str) -> None:
        if "{prompt}" not in prompt_format:
            raise ValueError(
                f"data.prompt_format ({prompt_format!r}) must contain {{prompt}}, for example "
                "'Question: {prompt}\\n\\nAnswer: '"
            )
        self._tokenizer = tokenizer
        self._prompt_format = prompt_format

    def write(self, pair: PreferencePair) -> TokenPair:
        text = self._prompt_format.replace("{prompt}", pair.prompt)
        prefix = self._tokenizer.prefix_text
        prompt = self._tokenizer.encode(text if text.startswith(prefix) else prefix + text)
        end = np.asarray(self._tokenizer.eos_token_ids[:1], np.int32)
        return TokenPair(
            *(
                np.concatenate([prompt, self._tokenizer.encode(answer), end])
                for answer in (pair.chosen, pair.rejected)
            )
        )


def fitting_pairs(pairs: Iterable[TokenPair], *, max_tokens: int, drop: bool) -> list[TokenPair]:
    """Pairs of which both texts fit; nothing is ever cut.

    ValueError for one that does not fit, or with `drop` when none does.
    """
    pairs = list(pairs)
    kept = [pair for pair in pairs if pair.num_tokens <= max_tokens]
    longest = max((pair.num_tokens for pair in pairs), default=0)
    if len(kept) < len(pairs) and not drop:
        raise ValueError(
            f"data.max_tokens ({max_tokens}) is less than the {longest} tokens of the longest of "
            "all texts; raise it, or set data.too_long=drop"
        )
    if pairs and not kept:
        raise ValueError(
            f"data.max_tokens ({max_tokens}) is less than every one of {len(pairs)} pairs needs; "
            "raise it"
        )
    return kept


def _read_pair(record: object) -> PreferencePair:
    if not isinstance(record, Mapping):
        raise ValueError(f"it is a {type(record).__name__}, not an object")
    for names in _LAYOUTS.values():
        if all(name in record for name in names):
            break
    else:
        known = " or ".join(f"{', '.join(names)} ({name})" for name, names in _LAYOUTS.items())
        raise ValueError(f"its fields are {', '.join(map(str, record))}; wanted are {known}")
    for name in names:
        if not isinstance(record[name], str):
            raise ValueError(f"{name} must be a string, not a {type(record[name]).__name__}")
    prompt, chosen, rejected = (record[name] for name in names)
    if chosen == rejected:
        raise ValueError(f"{names[1]} and {names[2]} are the same text")
    return PreferencePair(prompt=prompt, chosen=chosen, rejected=rejected)

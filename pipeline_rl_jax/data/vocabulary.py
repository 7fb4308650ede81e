"""Whether two checkpoints mean the same by a token id.

Owns the comparison of two `tokenizer.json` and the text of one model as the ids of another.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from pipeline_rl_jax.data.tokenizer import Tokenizer
from pipeline_rl_jax.records import Completion, StopReason


def vocabulary_hash(directory: Path) -> str:
    """SHA-256 of every (id, token) of `directory/tokenizer.json`, added tokens too.

    Two with the same hash give every id the same text. Merges, normalisation and templates are not
    looked at: they decide how text is cut, which nobody does again when ids are passed on.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{directory} holds no tokenizer.json; save the model's tokenizer there")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of the ids
            vocabulary = {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
        tokens = {int(token_id): token for token, token_id in vocabulary.items()}
        tokens |= {int(each["id"]): each["content"] for each in content.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a tokenizer that can be read") from error
    text = json.dumps(sorted(tokens.items()), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_same_vocabulary(actor: Path, scorer: Path, *, setting: str, way_out: str) -> None:
    """ValueError, in one line, when tokens of the actor are not tokens of the scorer.

    `setting` names where the scorer comes from, e.g. "reward_model.source"; `way_out` ends the
    line, e.g. "set reward_model.streaming to False: …".
    """
    if vocabulary_hash(actor) != vocabulary_hash(scorer):
        raise ValueError(
            f"{setting} ({scorer}) has another tokenizer than the actor ({actor}), so what the "
            f"actor writes cannot be scored token by token; {way_out}"
        )


def encode_again(completion: Completion, tokenizer: Tokenizer) -> np.ndarray:
    """Prompt and completion as ids of another tokenizer, [T] int32; for scoring only.

    An end of sequence that the actor wrote becomes the other tokenizer's (its first). Special
    tokens that only the actor's template knows are read as plain text.
    """
    token_ids = tokenizer.encode(completion.prompt.text + completion.text)
    if completion.stop_reason is StopReason.EOS:
        token_ids = np.append(token_ids, np.int32(tokenizer.eos_token_ids[0]))
    return token_ids


def own_tokens(completion: Completion) -> np.ndarray:
    """Prompt and completion as the actor's ids, [T] int32."""
    return np.concatenate([completion.prompt.token_ids, completion.token_ids])

"""Decodes a completion while its tokens arrive.

Owns the text so far of one completion, at a cost that does not grow with its length: what stop
strings are looked for in. The text that rewards see is decoded once, from all ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline_rl_jax.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what the bytes of an unfinished character decode to
_MAX_HELD_TOKENS = 16  # a character has at most 4 bytes; more than this is not going to finish


class IncrementalDecoder:
    """Text of a growing list of token ids; special tokens leave no text.

    A character whose bytes are spread over several tokens appears once it is complete. Joined, the
    pieces are `Tokenizer.decode` of all ids, apart from such an unfinished end and from bytes that
    are no text at all.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The tokens before are decoded again as context: a decoder may treat the first token of a
        # text in its own way (a leading space, say).
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []
        self.text = ""

    def extend(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete, often of all of them."""
        pieces = [self._step(int(token_id)) for token_id in token_ids]
        new_text = "".join(pieces)
        self.text += new_text
        return new_text

    def _step(self, token_id: int) -> str:
        self._held.append(token_id)
        whole = self._tokenizer.decode(self._context + self._held)
        if whole.endswith(_INCOMPLETE) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        piece = whole[len(self._context_text) :]
        self._context, self._held = self._held, []
        self._context_text = self._tokenizer.decode(self._context)
        return piece

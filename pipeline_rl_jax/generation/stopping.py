"""When a completion is over: end-of-sequence tokens and stop strings.

Owns the tokens that end a completion on the device, and the search for stop strings that span
tokens, which happens on the host at chunk borders. What follows a stop in its chunk is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_rl_jax.data.incremental_decoder import IncrementalDecoder
from pipeline_rl_jax.data.tokenizer import Tokenizer
from pipeline_rl_jax.records import StopReason


class StopRules:
    """What ends a completion.

    `token_ids` are the ids that the device stops at: end-of-sequence ids (none with `ignore_eos`),
    and every token whose own text contains a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop_strings: Sequence[str], ignore_eos: bool
    ) -> None:
        self._tokenizer = tokenizer
        self.stop_strings = tuple(stop_strings)
        self._eos_ids = frozenset() if ignore_eos else frozenset(tokenizer.eos_token_ids)
        self.token_ids = tuple(sorted(self._eos_ids | self._stop_string_ids()))

    def reason(self, last_token: int) -> StopReason:
        """Why the device stopped at this token."""
        return StopReason.EOS if last_token in self._eos_ids else StopReason.STOP_STRING

    def watcher(self) -> StopStringWatcher | None:
        """A search for stop strings over one completion; None when there are none to find."""
        return StopStringWatcher(self._tokenizer, self.stop_strings) if self.stop_strings else None

    def _stop_string_ids(self) -> frozenset[int]:
        if not self.stop_strings:
            return frozenset()
        tokenizer = self._tokenizer
        texts = (tokenizer.decode([i]) for i in range(tokenizer.vocabulary_size))
        return frozenset(
            i for i, text in enumerate(texts) if any(stop in text for stop in self.stop_strings)
        )


class StopStringWatcher:
    """Finds the first stop string in a growing completion."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: tuple[str, ...]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop_strings = stop_strings
        self._longest = max(len(stop) for stop in stop_strings)

    def extend(self, token_ids: Sequence[int]) -> int | None:
        """Number of these tokens up to the one that completes a stop string, or None."""
        for count, token_id in enumerate(token_ids, start=1):
            new = self._decoder.extend([token_id])
            if not new:
                continue
            tail = self._decoder.text[-(self._longest + len(new)) :]
            if any(stop in tail for stop in self._stop_strings):
                return count
        return None

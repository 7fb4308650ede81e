"""Soft penalty for completions close to the maximum length (PipelineRL section 5)."""

from __future__ import annotations

from pipeline_rl_jax.records import Completion
from pipeline_rl_jax.rewards.score import Score


class Overlong:
    """Penalises the last `buffer_tokens` before `max_new_tokens`; see `overlong_penalty`."""

    def __init__(self, *, max_new_tokens: int, buffer_tokens: int) -> None:
        self._max_new_tokens = max_new_tokens
        self._buffer_tokens = buffer_tokens

    async def score(self, completion: Completion) -> Score:
        penalty = overlong_penalty(
            completion.num_tokens,
            max_new_tokens=self._max_new_tokens,
            buffer_tokens=self._buffer_tokens,
        )
        return Score(value=penalty)

    async def close(self) -> None:
        return None


def overlong_penalty(num_tokens: int, *, max_new_tokens: int, buffer_tokens: int) -> float:
    """0 for short completions, falling to -1 at the maximum length.

        ((max_new_tokens - buffer_tokens) - num_tokens) / buffer_tokens
        for max_new_tokens - buffer_tokens < num_tokens <= max_new_tokens

    A buffer of 0 means off. Lengths in tokens of the completion alone. The paper gives the formula
    and not the buffer (PipelineRL section 5).
    """
    if buffer_tokens == 0:
        return 0.0
    spare_tokens = max_new_tokens - buffer_tokens - num_tokens
    return min(0.0, max(-1.0, spare_tokens / buffer_tokens))

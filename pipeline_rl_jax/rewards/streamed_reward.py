"""The reward model's score as one component of the reward, where the model is streamed.

Owns the score of completions that nobody streamed, those of an evaluation: they are read by the
same model under keys of their own, so that no training sample of the same id is mixed up with them.
"""

from __future__ import annotations

import itertools

from pipeline_rl_jax.records import Completion
from pipeline_rl_jax.rewards.score import Score
from pipeline_rl_jax.rewards.stream_readers import REWARD_MODEL, StreamReaders


class StreamedReward:
    """A `Scorer` of whole completions. Streamed ones bring their score with them."""

    def __init__(self, readers: StreamReaders) -> None:
        """`readers` with one of the name `REWARD_MODEL`, whose readout is a score."""
        self._readers = readers
        self._ids = itertools.count(1)

    async def score(self, completion: Completion) -> Score:
        key = (-next(self._ids), 0)  # prompt ids are 0 or more
        value = await self._readers.read_whole(REWARD_MODEL, completion, key)
        return Score(value=float(value))

    async def close(self) -> None:
        """The readers are their owner's to close."""

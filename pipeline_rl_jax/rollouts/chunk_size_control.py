"""How many tokens a slot decodes per chunk: tried out, measured, and tried again later.

Owns which candidate the next step uses, and the measurements. Small chunks let scoring overlap
decoding more finely, large ones cost fewer calls; which is faster depends on lengths and changes
over a run. Source: OPPO, arXiv 2509.25762 (candidates 128, 256, 512; about every 50 steps).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


class ChunkSizeController:
    """The chunk size of the next step.

    A period of `period_steps` begins with trials: `trial_steps` rounds, each of which gives every
    candidate one step, so that a drift of lengths meets all of them alike. The candidate with the
    lowest median of seconds per decoded token then serves the rest of the period. Per token, not
    per step: steps differ in length by chance far more than by chunk size. The first step ever of a
    candidate is repeated and not measured, because the decode loop is compiled in it. Equal
    medians: the one in use before stays, else the first as listed.
    """

    def __init__(
        self, *, candidates: Sequence[int], period_steps: int, trial_steps: int = 1
    ) -> None:
        """Raises ValueError when a period holds no more than its trials. One candidate is fixed."""
        if not candidates or min(candidates) < 1 or len(set(candidates)) < len(candidates):
            raise ValueError(
                f"chunk_size: candidates ({tuple(candidates)}) must be different numbers of "
                "tokens, at least one of them"
            )
        num_trials = (trial_steps + 1) * len(candidates)  # the unmeasured steps included
        if trial_steps < 1 or (len(candidates) > 1 and period_steps <= num_trials):
            raise ValueError(
                f"chunk_size: period_steps ({period_steps}) must be above (trial_steps + 1) * "
                f"candidates ({num_trials}), trial_steps ({trial_steps}) at least 1; lengthen the "
                "period or try fewer candidates"
            )
        self._candidates = tuple(candidates)
        self._period_steps = period_steps
        self._trial_steps = trial_steps
        self._chosen = self._candidates[0]
        self._compiled: set[int] = set()
        self._step = 0  # steps of this period that are over
        self._seconds_per_token: dict[int, list[float]] = {size: [] for size in candidates}

    @property
    def tokens(self) -> int:
        """Chunk size of the next step."""
        trials = self._trials_left()
        return trials[0] if trials else self._chosen

    def observe(self, *, seconds: float, num_tokens: int) -> None:
        """A step has used `tokens`: how long it took and how many tokens it decoded.

        A step that decoded nothing says nothing of a chunk size; a trial is then repeated.
        """
        if len(self._candidates) == 1:
            return
        trials = self._trials_left()
        if trials and num_tokens > 0:
            self._measure(trials[0], seconds / num_tokens)
            if not self._trials_left():
                self._choose()
        self._step += 1
        if self._step >= self._period_steps and not self._trials_left():
            self._step = 0
            self._seconds_per_token = {size: [] for size in self._candidates}

    def metrics(self) -> dict[str, float]:
        """Medians are of this period, and left out before a candidate's first measured step."""
        medians = {
            f"chunk_size/{size}_seconds_per_token": statistics.median(measured)
            for size, measured in self._seconds_per_token.items()
            if measured
        }
        return {
            "chunk_size/tokens": float(self.tokens),
            "chunk_size/chosen_tokens": float(self._chosen),
            **medians,
        }

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs, as plain values that JSON can hold."""
        return {
            "chosen": self._chosen,
            "step": self._step,
            "measured": [[size, times] for size, times in self._seconds_per_token.items()],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes on from a snapshot; after a change of candidates a new period begins.

        A resumed run compiles anew, so the first step of each candidate is again not measured.
        """
        measured = {size: list(times) for size, times in snapshot["measured"]}
        if snapshot["chosen"] in self._candidates:
            self._chosen = snapshot["chosen"]
        if set(measured) == set(self._candidates):
            self._step = snapshot["step"]
            self._seconds_per_token = {size: measured[size] for size in self._candidates}

    def _trials_left(self) -> list[int]:
        """Candidates to be tried in this period, in the order of their steps."""
        if len(self._candidates) == 1:
            return []
        rounds = range(self._trial_steps)
        return [
            size
            for number in rounds
            for size in self._candidates
            if len(self._seconds_per_token[size]) <= number
        ]

    def _measure(self, size: int, seconds_per_token: float) -> None:
        if size in self._compiled:
            self._seconds_per_token[size].append(seconds_per_token)
        self._compiled.add(size)

    def _choose(self) -> None:
        medians = {
            size: statistics.median(times) for size, times in self._seconds_per_token.items()
        }
        fastest = min(medians.values())
        if medians[self._chosen] > fastest:
            self._chosen = next(size for size in self._candidates if medians[size] == fastest)

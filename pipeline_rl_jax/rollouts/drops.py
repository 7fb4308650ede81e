"""The account of rollouts that were generated, or begun, and not trained on.

Owns the reasons that arise in a schedule and the counter. The reasons that arise while a batch is
assembled are the preprocessor's; they enter under its own words.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping


class DropReason(enum.StrEnum):
    """Why a schedule gave a rollout up."""

    BEYOND_MAX_LAG = "beyond_max_lag"  # schedule.beyond_max_lag = "drop" found it too old
    CANCELLED = "cancelled"  # still being generated or scored when the run ended
    LEFT_AT_END = "left_at_end"  # finished, but the run ended before its batch
    BATCH_EMPTY = "batch_empty"  # the preprocessor found nothing to train on in its batch


class DropCounter:
    """Rollouts dropped, by reason."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()

    def count(self, reason: str, num_rollouts: int) -> None:
        if num_rollouts:
            self._counts[str(reason)] += num_rollouts

    @property
    def counts(self) -> Mapping[str, int]:
        return dict(self._counts)

    @property
    def total(self) -> int:
        return self._counts.total()

"""Groups turned away before they take a place in a batch, so that others are generated instead.

Owns `algorithm.zero_variance = "refill"`: which finished groups are refused, and the allowance that
keeps a hard data set from stalling the run. Dropping them later, inside a batch that then is
smaller, is in `batches.py`.
"""

from __future__ import annotations

from pipeline_rl_jax.preprocess.batches import find_refusal
from pipeline_rl_jax.records import Group
from pipeline_rl_jax.settings import Settings


class RefillRule:
    """Refuses groups with nothing to learn from, within an allowance.

    Every refusal costs one; every group that is kept earns `max_refill_share`, up to what a whole
    batch earns, which is also what the rule starts with. So at most `max_refill_share` groups are
    refused for each one kept, and never more than that many batches in a row, whatever the schedule
    and however many batches are out at once. Beyond the allowance a group is kept as with
    `zero_variance = "keep"`, and counted.
    """

    def __init__(self, settings: Settings) -> None:
        algorithm = settings.algorithm
        self._algorithm = algorithm
        self._earned = algorithm.max_refill_share if algorithm.zero_variance == "refill" else 0.0
        batch_groups = settings.trainer.batch_rollouts // algorithm.group_size
        # A share below one group a batch still adds up to a whole group in the end.
        self._most = max(1.0, self._earned * batch_groups) if self._earned else 0.0
        self._allowance = self._most
        self._num_kept_unwillingly = 0

    def refuse(self, group: Group) -> str | None:
        """Why the group is turned away, or None to keep it."""
        if self._algorithm.zero_variance != "refill":
            return None
        reason = find_refusal(group, self._algorithm)
        if reason is not None and self._allowance >= 1.0:
            self._allowance -= 1.0
            return reason.value
        self._num_kept_unwillingly += reason is not None
        self._allowance = min(self._most, self._allowance + self._earned)
        return None

    def take_num_kept_unwillingly(self) -> int:
        """Groups kept for want of allowance since the last call."""
        taken, self._num_kept_unwillingly = self._num_kept_unwillingly, 0
        return taken

"""How old a rollout may be when it is trained on: at admission, and again at consumption.

Owns the account of groups that are out, the rule for admitting more, the rule for closing a batch,
and what happens to tokens beyond the bound. Versions are weight versions (optimizer steps); the
batch of version v is the one trained on by weights v, where a token sampled by weights w has the
lag v - w. Groups are the unit: a batch is `batch_groups` groups, of whatever size they finished.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from pipeline_rl_jax.records import Group, PackedBatch, Rollout
from pipeline_rl_jax.rollouts.groups import CollectedGroup

_Batch = TypeVar("_Batch", bound=PackedBatch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagBound:
    """`max_lag` and what becomes of tokens beyond it.

    wait: the trainer waits for stragglers, so that there are none. drop: rollouts that hold one are
    given up. mask: the tokens leave the loss, the rest of their rollout stays.
    """

    max_lag: int
    beyond: Literal["wait", "drop", "mask"]

    def within(self, rollout: Rollout, version: int) -> bool:
        """True when weights `version` may train on every token of the rollout."""
        versions = rollout.completion.weight_versions
        return not versions.size or version - int(versions.min()) <= self.max_lag

    def keep(self, group: Group, version: int) -> Group:
        """drop: the group without the rollouts beyond the bound. Otherwise the group."""
        if self.beyond != "drop":
            return group
        kept = tuple(rollout for rollout in group.rollouts if self.within(rollout, version))
        return dataclasses.replace(group, rollouts=kept)

    def mask(self, batch: _Batch, version: int) -> tuple[_Batch, int]:
        """mask: the batch without loss on tokens beyond the bound, and how many those are.

        Otherwise the batch, and 0.
        """
        if self.beyond != "mask":
            return batch, 0
        beyond = batch.loss_mask & (batch.weight_versions < version - self.max_lag)
        return dataclasses.replace(batch, loss_mask=batch.loss_mask & ~beyond), int(beyond.sum())

    def check(self, groups: Iterable[Group], version: int) -> None:
        """Unless masked later: RuntimeError when a token is beyond the bound after all.

        Admission and the closing of batches keep the bound as long as the decode loop uses the
        weights it is given; this is where a decode loop that does not is found out.
        """
        if self.beyond == "mask":
            return
        for group in groups:
            if not all(self.within(rollout, version) for rollout in group.rollouts):
                raise RuntimeError(
                    f"prompt_id {group.prompt.prompt_id} holds a token more than {self.max_lag} "
                    f"steps older than the weights {version} that were to train on it"
                )


class LagAccount:
    """Groups that are out, by the weight version at their admission.

    Admission keeps, for every horizon h, the number of groups admitted for batches before h at most
    (h - next_version) * batch_groups. With h = weights.version + max_lag + 1 this is

        admitted - dropped <= (weights.version + max_lag + 1) * batch_groups.

    A group admitted at version w must be trained on by the batch of version w + max_lag, its
    deadline. Hence the invariant, before any batch of version v is closed and after,

        for all d:  groups out with deadline <= d  <=  batch_groups * (batches left up to d).

    Admission keeps it (all groups out together are within the bound of the newest deadline),
    dropping keeps it, and `choose` closes a batch only if it is kept. The batch of the oldest
    groups out always keeps it and those are being decoded, so a batch that waits will be closed:
    the bound is strict and free of deadlock. Waiting only for groups that are already due would
    not be enough: more of them than fit one batch can come due at once.
    """

    def __init__(
        self, bound: LagBound, *, batch_groups: int, next_version: int, last_version: int
    ) -> None:
        """`next_version` trains the next batch; no batch is trained from `last_version` on."""
        self.bound = bound
        self._batch_groups = batch_groups
        self._out: collections.Counter[int] = collections.Counter()  # by admitted version
        self.next_version = next_version
        self.last_version = last_version

    @property
    def num_out(self) -> int:
        """Groups admitted and neither in a closed batch nor dropped."""
        return self._out.total()

    @property
    def complete(self) -> bool:
        """True when the last batch of the run has been closed."""
        return self.next_version >= self.last_version

    def room(self, horizon: int) -> int:
        """Groups that may still be admitted for batches of versions before `horizon`."""
        batches = min(horizon, self.last_version) - self.next_version
        return batches * self._batch_groups - self.num_out

    def admit(self, version: int) -> None:
        """A group is out; its first token will come from weights `version` or newer."""
        self._out[version] += 1

    def release(self, group: CollectedGroup) -> None:
        """The group was dropped before it entered a batch; another may take its place."""
        self._remove([group])

    def close_batch(self, groups: Sequence[CollectedGroup]) -> int:
        """The groups leave as the next batch; returns the version that trains it."""
        self._remove(groups)
        self.next_version += 1
        return self.next_version - 1

    def reopen_batch(self) -> None:
        """The batch closed last came to nothing: its groups are dropped, its place is open."""
        self.next_version -= 1

    def choose(self, waiting: Sequence[CollectedGroup]) -> Sequence[CollectedGroup] | str:
        """From finished groups, oldest first: the next batch, or the name of what is missing.

        With `drop`, groups that have nothing left within the bound come alone, to be dropped at
        once: they would hold the place of others.
        """
        if self.bound.beyond == "drop":
            stale = [item for item in waiting if self._is_stale(item)]
            if stale:
                return stale
        if len(waiting) < self._batch_groups:
            return "rollouts"
        chosen = waiting[: self._batch_groups]
        if self.bound.beyond == "wait" and not self._keeps_bound_without(chosen):
            return "stragglers (max_lag)"
        return chosen

    def _is_stale(self, item: CollectedGroup) -> bool:
        rollouts = item.group.rollouts
        return not any(self.bound.within(rollout, self.next_version) for rollout in rollouts)

    def _keeps_bound_without(self, chosen: Sequence[CollectedGroup]) -> bool:
        """The invariant, after `chosen` has become the next batch."""
        left = self._out - collections.Counter(item.admitted_version for item in chosen)
        num_due = 0
        for admitted_version in sorted(left):
            num_due += left[admitted_version]
            batches_left = admitted_version + self.bound.max_lag - self.next_version
            if num_due > batches_left * self._batch_groups:
                return False
        return True

    def _remove(self, groups: Sequence[CollectedGroup]) -> None:
        for group in groups:
            if not self._out[group.admitted_version]:
                raise ValueError(
                    f"prompt_id ({group.group.prompt.prompt_id}) is not out: it was admitted at "
                    f"version {group.admitted_version} and has left already"
                )
            self._out[group.admitted_version] -= 1
            if not self._out[group.admitted_version]:
                del self._out[group.admitted_version]  # a long run has many versions

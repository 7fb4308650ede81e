"""More prompts in flight than a batch needs: the first to finish train, the others are deferred.

Owns the admission of B + Δ groups, the choice of the B that train, the bound on deferrals and the
account of them. `OvercommitAccount` is the rule alone, in the place of a schedule's `LagAccount`;
`OvercommitQueue` adds the groups themselves and is complete around any training loop. Neither owns
decoding: a deferred sample stays where it is being generated. Source: OPPO, arXiv 2509.25762.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping, Sequence

from pipeline_rl_jax.records import Group, Prompt, Rollout
from pipeline_rl_jax.rollouts.drops import DropCounter, DropReason
from pipeline_rl_jax.rollouts.groups import CollectedGroup, GroupCollector
from pipeline_rl_jax.rollouts.staleness import LagAccount, LagBound


class OvercommitAccount(LagAccount):
    """A `LagAccount` under which at most B + Δ groups are out, and one step trains one batch.

    B is `batch_groups`, Δ is `overcommit` and may be changed between any two calls. A group is
    deferred once by every batch that closes without it, which with one batch per version is its
    lag: so the bound on deferrals is the bound on lag that a batch waits for, strict and free of
    deadlock by the invariant of `LagAccount`. It caps Δ at max_deferrals · B. Before the last
    version no more is admitted than the batches that are left can hold, so that nothing is left.

    Of the groups that have finished, those admitted first train first.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        overcommit: int,
        max_deferrals: int,
        next_version: int = 0,
        last_version: int = sys.maxsize,
    ) -> None:
        bound = LagBound(max_lag=max_deferrals, beyond="wait")
        super().__init__(
            bound, batch_groups=batch_groups, next_version=next_version, last_version=last_version
        )
        self._deferrals: collections.Counter[int] = collections.Counter()
        self._last_batch: collections.Counter[int] = collections.Counter()
        self.overcommit = overcommit

    @property
    def overcommit(self) -> int:
        """Δ, in groups."""
        return self._overcommit

    @overcommit.setter
    def overcommit(self, groups: int) -> None:
        if groups < 0:
            raise ValueError(f"overcommit ({groups}) must not be negative; 0 means off")
        self._overcommit = groups

    @property
    def deferrals(self) -> Mapping[int, int]:
        """Groups trained on, by the number of batches that had closed without them."""
        return dict(sorted(self._deferrals.items()))

    def room(self, horizon: int) -> int:
        """Groups that may be admitted; not positive while more than B + Δ are out."""
        return min(super().room(horizon), self._batch_groups + self._overcommit - self.num_out)

    @property
    def horizon(self) -> int:
        """Of a group whose first token comes from the weights of the next batch."""
        return self.next_version + self.bound.max_lag + 1

    def close_batch(self, groups: Sequence[CollectedGroup]) -> int:
        """The groups leave as the next batch; every other group out is deferred once more."""
        version = super().close_batch(groups)
        self._last_batch = collections.Counter(version - item.admitted_version for item in groups)
        self._deferrals.update(self._last_batch)
        return version

    def reopen_batch(self) -> None:
        """The batch closed last came to nothing: it deferred nobody, and its groups are dropped."""
        super().reopen_batch()
        self._deferrals -= self._last_batch
        self._last_batch = collections.Counter()

    def metrics(self) -> dict[str, float]:
        """Of the batch closed last, and the histogram since the start."""
        batch = self._last_batch
        steps = sum(deferrals * count for deferrals, count in batch.items())
        return {
            "overcommit/allowed_groups": float(self._overcommit),
            "overcommit/deferred_groups": float(self.num_out),
            "overcommit/deferrals_mean_steps": steps / max(batch.total(), 1),
            "overcommit/deferrals_max_steps": float(max(batch, default=0)),
            **{
                f"overcommit/deferred_{deferrals}_steps_groups": float(count)
                for deferrals, count in self.deferrals.items()
            },
        }


class OvercommitQueue:
    """The groups of a training loop: out, finished, trained on exactly once or counted as left.

        queue = OvercommitQueue(batch_groups=B, overcommit=Δ, max_deferrals=2)
        for step in range(num_steps):
            for _ in range(queue.room):
                queue.admit(next(prompts), size=group_size)  # and begin to sample it
            while queue.missing:
                for rollout in decode_one_chunk_and_score():
                    queue.add(rollout)
            train(queue.take())  # B groups; what is live goes on in the next step
        queue.abandon()

    Groups may be of any size. With Δ = 0 it is the plain loop: B prompts in, B groups out.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        overcommit: int,
        max_deferrals: int,
        num_batches: int = sys.maxsize,
    ) -> None:
        """`num_batches` of the run, if known: the last of them then leave nothing behind."""
        self.account = OvercommitAccount(
            batch_groups=batch_groups,
            overcommit=overcommit,
            max_deferrals=max_deferrals,
            last_version=num_batches,
        )
        self.drops = DropCounter()
        self._collector = GroupCollector()
        self._finished: list[CollectedGroup] = []  # in order of admission

    @property
    def room(self) -> int:
        """Prompts to admit now, for B + Δ groups in flight; never negative."""
        return max(self.account.room(self.account.horizon), 0)

    @property
    def missing(self) -> str:
        """What the next batch waits for: nothing (""), "rollouts", or stragglers by name."""
        chosen = self.account.choose(self._finished)
        return "" if not isinstance(chosen, str) else _rename(chosen)

    def admit(self, prompt: Prompt, *, size: int) -> None:
        """`size` samples of the prompt are in flight. Raises ValueError when there is no room."""
        if not self.room:
            raise ValueError(
                f"prompt_id ({prompt.prompt_id}) finds no room: {self.account.num_out} groups are "
                f"out; take a batch first"
            )
        version = self.account.next_version
        self._collector.open(prompt, size, version=version)
        self.account.admit(version)

    def add(self, rollout: Rollout) -> None:
        """A sample has finished and been scored."""
        self._keep(self._collector.add(rollout))

    def lose(self, prompt_id: int, sample_index: int, *, reason: str) -> None:
        """A sample will never come; a group without any is given up and makes room."""
        self.drops.count(reason, 1)
        self._keep(self._collector.lose(prompt_id, sample_index))

    def take(self) -> list[Group]:
        """The next batch, in order of admission. Raises RuntimeError while something is missing."""
        chosen = self.account.choose(self._finished)
        if isinstance(chosen, str):
            raise RuntimeError(f"no batch can be taken yet: it waits for {_rename(chosen)}")
        self._finished = self._finished[len(chosen) :]
        self.account.close_batch(chosen)
        return [item.group for item in chosen]

    def drain(self) -> list[Group]:
        """At the end of the run: the finished groups that fill no batch, to be used elsewhere."""
        left, self._finished = self._finished, []
        for item in left:
            self.account.release(item)
        return [item.group for item in left]

    def abandon(self) -> None:
        """At the end of the run: counts what is finished or in flight as dropped."""
        num_finished = sum(len(group.rollouts) for group in self.drain())
        came_back, still_out = self._collector.abandon()
        self.drops.count(DropReason.LEFT_AT_END, num_finished + came_back)
        self.drops.count(DropReason.CANCELLED, still_out)

    def _keep(self, item: CollectedGroup | None) -> None:
        if item is None:
            return
        if not item.num_rollouts:
            self.account.release(item)
            return
        self._finished.append(item)
        self._finished.sort(key=lambda finished: finished.order)


def _rename(missing: str) -> str:
    return "stragglers (max_deferrals)" if missing.startswith("stragglers") else missing

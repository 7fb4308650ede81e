"""Rollouts come back one by one; groups leave whole.

Owns which groups are open, their order of admission and what was lost of them. A member that
fails shrinks its group: the group still finishes, with fewer rollouts, possibly with none.
"""

from __future__ import annotations

import dataclasses

from pipeline_rl_jax.records import Group, Prompt, Rollout


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CollectedGroup:
    """A finished group and where it stands in the run.

    No token of it is older than `admitted_version`, so that is its age to every staleness rule,
    known before its first token is. `order` ascends with admission, and so does the version.
    """

    group: Group  # rollouts by sample index
    order: int  # how many groups were admitted before it
    admitted_version: int  # weight version of the decode loop when its prompt was admitted

    @property
    def num_rollouts(self) -> int:
        return len(self.group.rollouts)


@dataclasses.dataclass(kw_only=True)
class _OpenGroup:
    prompt: Prompt
    size: int
    order: int
    admitted_version: int
    rollouts: dict[int, Rollout]  # by sample index
    lost: set[int]  # sample indices


class GroupCollector:
    """Holds groups until every member has finished or failed."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenGroup] = {}  # by prompt id
        self._num_opened = 0

    @property
    def num_open(self) -> int:
        """Groups with a member still out."""
        return len(self._open)

    def open(self, prompt: Prompt, size: int, *, version: int) -> None:
        """Expects `size` rollouts of `prompt`, admitted under weight version `version`."""
        if prompt.prompt_id in self._open:
            raise ValueError(f"prompt_id ({prompt.prompt_id}) is already being generated")
        self._open[prompt.prompt_id] = _OpenGroup(
            prompt=prompt,
            size=size,
            order=self._num_opened,
            admitted_version=version,
            rollouts={},
            lost=set(),
        )
        self._num_opened += 1

    def add(self, rollout: Rollout) -> CollectedGroup | None:
        """The group if this was its last member, else None."""
        completion = rollout.completion
        entry = self._member(completion.prompt.prompt_id, completion.sample_index)
        entry.rollouts[completion.sample_index] = rollout
        return self._close_if_full(entry)

    def lose(self, prompt_id: int, sample_index: int) -> CollectedGroup | None:
        """Like `add` for a member that will never come."""
        entry = self._member(prompt_id, sample_index)
        entry.lost.add(sample_index)
        return self._close_if_full(entry)

    def abandon(self) -> tuple[int, int]:
        """Gives up every open group: (rollouts that had come back, members still out)."""
        came_back = sum(len(entry.rollouts) for entry in self._open.values())
        still_out = sum(
            entry.size - len(entry.rollouts) - len(entry.lost) for entry in self._open.values()
        )
        self._open.clear()
        return came_back, still_out

    def _member(self, prompt_id: int, sample_index: int) -> _OpenGroup:
        entry = self._open.get(prompt_id)
        if entry is None:
            raise ValueError(f"prompt_id ({prompt_id}) is of no open group")
        if not 0 <= sample_index < entry.size:
            raise ValueError(
                f"sample_index ({sample_index}) must be below the size of its group ({entry.size})"
            )
        if sample_index in entry.rollouts or sample_index in entry.lost:
            raise ValueError(
                f"sample_index ({sample_index}) of prompt_id ({prompt_id}) came back twice"
            )
        return entry

    def _close_if_full(self, entry: _OpenGroup) -> CollectedGroup | None:
        if len(entry.rollouts) + len(entry.lost) < entry.size:
            return None
        del self._open[entry.prompt.prompt_id]
        rollouts = tuple(entry.rollouts[index] for index in sorted(entry.rollouts))
        return CollectedGroup(
            group=Group(prompt=entry.prompt, rollouts=rollouts),
            order=entry.order,
            admitted_version=entry.admitted_version,
        )

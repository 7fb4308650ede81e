"""Which prompts are used up, so that a resumed run neither repeats nor skips any.

Owns the cursor into the data that a checkpoint stores. Prompts finish out of order: the state to
resume from is the one before the oldest prompt that has not finished, together with the ids of
later ones that have. What lies between is bounded by the prompts out at once.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from pipeline_rl_jax.records import Prompt


class PromptStream(Protocol):
    """The data, in a fixed order, with a place that can be stored."""

    def __next__(self) -> Prompt:
        """The next prompt; StopIteration at the end."""
        ...

    @property
    def num_dropped(self) -> int:
        """Prompts left out so far, for their length."""
        ...

    def get_state(self) -> Any:
        """The place of the next prompt, as plain values that JSON can hold."""
        ...

    def set_state(self, state: Any) -> None: ...


@dataclasses.dataclass(kw_only=True)
class _Entry:
    prompt_id: int
    state_before: Any  # of the stream, when this prompt was still its next
    finished: bool


class PromptLedger:
    """Hands prompts out and knows which of them have been trained on or dropped."""

    def __init__(self, stream: PromptStream) -> None:
        self._stream = stream
        self._entries: collections.deque[_Entry] = collections.deque()  # from the oldest unfinished
        self._by_id: dict[int, _Entry] = {}
        self._done_before: set[int] = set()  # finished in the run that was resumed, not yet met

    @property
    def num_dropped(self) -> int:
        """Prompts that the stream has left out so far."""
        return self._stream.num_dropped

    @property
    def num_unfinished(self) -> int:
        return sum(not entry.finished for entry in self._entries)

    def next(self) -> Prompt | None:
        """The next prompt that has not finished; None at the end of the data."""
        while True:
            state_before = copy.deepcopy(self._stream.get_state())
            try:
                prompt = next(self._stream)
            except StopIteration:
                return None
            finished = prompt.prompt_id in self._done_before
            self._enter(prompt.prompt_id, state_before, finished=finished)
            if not finished:
                return prompt
            self._done_before.discard(prompt.prompt_id)
            self._forget_finished()

    def finish(self, prompt_id: int) -> None:
        """The prompt has been trained on or dropped: a resumed run passes it by."""
        entry = self._by_id.get(prompt_id)
        if entry is None or entry.finished:
            raise ValueError(f"prompt_id ({prompt_id}) is not being used")
        entry.finished = True
        self._forget_finished()

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs, as plain values that JSON can hold."""
        state = self._entries[0].state_before if self._entries else self._stream.get_state()
        finished_since = {entry.prompt_id for entry in self._entries if entry.finished}
        return {
            "stream": copy.deepcopy(state),
            "finished": sorted(finished_since | self._done_before),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes back to a snapshot; only before the first prompt of this run."""
        if self._entries:
            raise RuntimeError("a ledger must be restored before its first prompt is taken")
        self._stream.set_state(snapshot["stream"])
        self._done_before = set(snapshot["finished"])

    def _enter(self, prompt_id: int, state_before: Any, *, finished: bool) -> None:
        if prompt_id in self._by_id:
            raise ValueError(f"prompt_id ({prompt_id}) came twice from the data while in use")
        entry = _Entry(prompt_id=prompt_id, state_before=state_before, finished=finished)
        self._entries.append(entry)
        self._by_id[prompt_id] = entry

    def _forget_finished(self) -> None:
        while self._entries and self._entries[0].finished:
            del self._by_id[self._entries.popleft().prompt_id]

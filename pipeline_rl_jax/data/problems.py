"""A problem with its gold answer, before any template or tokenizer.

Owns the record that every source yields and the interface of a source.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Protocol

_SPACE = re.compile(r"\s+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is asked and what is right. Both texts are stripped; a data file's are never empty."""

    problem: str
    answer: str
    task: str = ""  # data set or task name
    metadata: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for problems that differ in white space only; duplicates are found by it."""
        return _SPACE.sub(" ", self.problem)


class ProblemSource(Protocol):
    """Grain's random-access source: problem `index` is the same whenever it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Problem: ...

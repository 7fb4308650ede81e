"""The vocabulary of scoring: what one component says, and what the weighted sum of them says.

Owns types only. A value of 0.0 is a score like any other; "could not be scored" is a different
thing and has its own type, so that a broken reward is never trained on as a wrong answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # at run time the verifier's client must start without JAX, too
    from pipeline_rl_jax.records import Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """What one component says about one completion.

    `error` names, in snake_case, why there is no score: `value` then means nothing, the rollout is
    dropped and the reason is counted. `event` names something to count about a score that stands,
    such as an answer that ran into the verifier's deadline and is therefore wrong.
    """

    value: float
    error: str = ""
    detail: str = ""  # one line for people, beside `error`
    event: str = ""


class Scorer(Protocol):
    """One component of the reward. Exactly one score for every call, within a bounded time."""

    async def score(self, completion: Completion) -> Score: ...

    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredCompletion:
    """The reward of one completion and what it is made of."""

    reward: float  # weighted sum of `components`
    components: Mapping[str, float]  # unweighted, by name
    # The correctness component: 1 right, 0 wrong; accuracy is its mean. None when there is none.
    correct: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringFailure:
    """No score: the rollout is to be dropped and counted, never trained on."""

    reason: str  # snake_case, the same word as in the counters
    detail: str = ""

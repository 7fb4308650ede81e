"""Problems of the reasoning-gym generators, by task name.

Owns creating a generator and reading its entries. Entries with several right answers keep what
`reasoning_gym.get_score_answer_fn` needs in `metadata["reasoning_gym"]`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Container
from typing import Any

from pipeline_rl_jax.data.arithmetic import draw_number
from pipeline_rl_jax.data.problems import Problem
from pipeline_rl_jax.settings import ReasoningGymSettings

_MAX_REDRAWS = 64


class ReasoningProblems:
    """`num_records` entries of one task; entry i depends on (seed, i) only.

    An entry whose problem is held out is replaced by another one, chosen by (seed, i) too.
    """

    def __init__(
        self,
        task: ReasoningGymSettings,
        *,
        seed: int,
        num_records: int,
        held_out: Container[str] = frozenset(),
    ) -> None:
        self._task = task
        self._seed = seed
        self._entries = _create_entries(task, seed, num_records)
        self._held_out = held_out  # keys of problems

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int, /) -> Problem:
        position = index
        for attempt in range(_MAX_REDRAWS):
            problem = self._read(position)
            if problem.key not in self._held_out:
                return problem
            position = draw_number(f"{self._seed}/{index}/{attempt}", len(self))
        raise ValueError(
            f"data.reasoning_gym.task ({self._task.task}) has hardly a problem that is not held "
            "out for evaluation; use fewer evaluation.num_prompts, or options for harder problems"
        )

    def share_held_out(self, num_probes: int) -> float:
        """Share of the first `num_probes` entries whose problem is held out."""
        num_probes = min(num_probes, len(self))
        held_out = [self._read(index).key in self._held_out for index in range(num_probes)]
        return sum(held_out) / num_probes

    def _read(self, position: int) -> Problem:
        entry = self._entries[position]
        answer = entry["answer"]
        return Problem(
            problem=entry["question"].strip(),
            answer="" if answer is None else str(answer).strip(),
            task=self._task.task,
            metadata={"reasoning_gym": entry["metadata"]},
        )


def _create_entries(task: ReasoningGymSettings, seed: int, num_records: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ValueError(
            f"data.source (reasoning_gym) needs the reasoning-gym package ({error}); run: "
            "pip install reasoning-gym"
        ) from error
    if task.task not in DATASETS:
        close = difflib.get_close_matches(task.task, DATASETS, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}?" if close else f"use one of {sorted(DATASETS)}"
        raise ValueError(f"data.reasoning_gym.task ({task.task}) is not known; {hint}")
    try:
        options = json.loads(task.options)
        return reasoning_gym.create_dataset(task.task, seed=seed, size=num_records, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"data.reasoning_gym.options ({task.options}) do not fit the task {task.task}: {error}"
        ) from error

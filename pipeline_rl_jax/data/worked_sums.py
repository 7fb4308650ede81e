"""Sums worked out by counting, as texts to teach a model from scratch with.

Owns how such a text looks. `What is 3 + 12?` is answered by as many lines as the first operand
says, each moving one over, so its length has the distribution of that operand. The last number is
the answer:

    2+13
    1+14
    0+15

A line follows from the one above alone, so little has to be learnt.
"""

from __future__ import annotations

import dataclasses

from pipeline_rl_jax.data.arithmetic import draw_number, draw_problem_number, problem_of_number
from pipeline_rl_jax.settings import ArithmeticSettings

ALPHABET = "\n 0123456789+?Whatis"
PROMPT_FORMAT = "{problem}\n"  # of data.prompt_format
_RESOLUTION = 2**32  # of the share of slips


@dataclasses.dataclass(frozen=True)
class WorkedSum:
    """What a model is asked and what it is taught to write."""

    prompt: str
    completion: str


def worked_sum(task: ArithmeticSettings, key: str, *, slip_share: float) -> WorkedSum:
    """A problem drawn by `key`, with a solution. `task` must be sums of two numbers >= 1.

    A line slips with probability `slip_share`: it counts by none or by two, and the lines after it
    go on from there. So a solution of n lines has none with probability `(1 - slip_share)^n`.
    """
    problem = problem_of_number(task, draw_problem_number(task, key)).problem
    times, number = map(int, problem.removeprefix("What is ").rstrip("?").split(" + "))
    lines, total = [], number
    for left in reversed(range(times)):
        total += 1
        draw = draw_number(f"{key}/line {left}", _RESOLUTION)
        if draw < slip_share * _RESOLUTION:
            total += 1 if draw % 2 else -1
        lines.append(f"{left}+{total}")
    return WorkedSum(PROMPT_FORMAT.format(problem=problem), "\n".join(lines))

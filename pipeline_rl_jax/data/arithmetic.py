"""Procedural sums, differences and products.

Owns the space of distinct problems: each is one number below `num_distinct`, its digits in mixed
radix the operands and operations. So a problem is drawn, told apart and held out by its number.
Problems are equally likely, or small first operands more so (`data.arithmetic.first_operand_tail`):
a model that takes as many steps as the first operand says then writes lengths with a long tail.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Container

from pipeline_rl_jax.data.problems import Problem
from pipeline_rl_jax.settings import ArithmeticSettings

_TASK = "arithmetic"
_RESOLUTION = 2**32  # of the probabilities of first operands


class ArithmeticProblems:
    """`num_records` draws from the space; draw i depends on (seed, i) only.

    >>> task = ArithmeticSettings(
    ...     operations="+", min_operand=3, max_operand=3, num_operands=2, first_operand_tail=0.0,
    ...     num_records=1,
    ... )
    >>> ArithmeticProblems(task, seed=0)[0].problem
    'What is 3 + 3?'
    """

    def __init__(
        self, task: ArithmeticSettings, *, seed: int, held_out: Container[int] = frozenset()
    ) -> None:
        self._task = task
        self._seed = seed
        self._held_out = held_out  # at most a tenth of the space: a redraw succeeds

    def __len__(self) -> int:
        return self._task.num_records

    def __getitem__(self, index: int, /) -> Problem:
        draws = (
            draw_problem_number(self._task, f"{self._seed}/{index}/{attempt}")
            for attempt in itertools.count()
        )
        return problem_of_number(
            self._task, next(number for number in draws if number not in self._held_out)
        )


def num_distinct(task: ArithmeticSettings) -> int:
    """Size of the space: operand range ** operands * operations ** (operands - 1)."""
    num_values = task.max_operand - task.min_operand + 1
    num_operations = len(_operations(task))
    return num_values**task.num_operands * num_operations ** (task.num_operands - 1)


def draw_number(key: str, limit: int) -> int:
    """A number below `limit`, the same for the same key on every machine and version."""
    # 16 bytes more than the limit needs leave no measurable bias.
    num_bytes = (limit.bit_length() + 7) // 8 + 16
    digest = hashlib.shake_256(key.encode()).digest(num_bytes)
    return int.from_bytes(digest, "big") % limit


def draw_problem_number(task: ArithmeticSettings, key: str) -> int:
    """The number of a problem, the same for the same key; distributed as the task says.

    `P(first operand = min_operand + i) ∝ (i + 1)^-first_operand_tail`; all else is uniform.
    """
    if not task.first_operand_tail:
        return draw_number(key, num_distinct(task))
    bounds = _first_operand_bounds(task.max_operand - task.min_operand + 1, task.first_operand_tail)
    place = bisect.bisect_right(bounds, draw_number(f"{key}/first", _RESOLUTION))
    rest = draw_number(key, num_distinct(task) // len(bounds))
    return rest * len(bounds) + place  # the first operand is the lowest digit


@functools.cache
def _first_operand_bounds(num_values: int, tail: float) -> tuple[int, ...]:
    """Where each value's share of `_RESOLUTION` ends."""
    weights = [(place + 1) ** -tail for place in range(num_values)]
    totals = list(itertools.accumulate(weights))
    return tuple(round(total / totals[-1] * _RESOLUTION) for total in totals)


def problem_of_number(task: ArithmeticSettings, number: int) -> Problem:
    """The problem with this number in the space."""
    num_values = task.max_operand - task.min_operand + 1
    operations = _operations(task)
    operands, chosen = [], []
    for _ in range(task.num_operands):
        number, value = divmod(number, num_values)
        operands.append(task.min_operand + value)
    for _ in range(task.num_operands - 1):
        number, operation = divmod(number, len(operations))
        chosen.append(operations[operation])
    first, *rest = (f"({value})" if value < 0 else str(value) for value in operands)
    terms = [f" {operation} {value}" for operation, value in zip(chosen, rest, strict=True)]
    return Problem(
        problem=f"What is {first}{''.join(terms)}?",
        answer=str(_evaluate(operands, chosen)),
        task=_TASK,
    )


def _operations(task: ArithmeticSettings) -> str:
    return "".join(dict.fromkeys(task.operations))


def _evaluate(operands: list[int], operations: list[str]) -> int:
    """Products first, then from left to right."""
    total, product, sign = 0, operands[0], 1
    for operation, operand in zip(operations, operands[1:], strict=True):
        if operation == "*":
            product *= operand
        else:
            total += sign * product
            product, sign = operand, 1 if operation == "+" else -1
    return total + sign * product

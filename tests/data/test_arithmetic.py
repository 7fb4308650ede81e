import re

import pytest

from pipeline_rl_jax.data.arithmetic import (
    ArithmeticProblems,
    draw_number,
    draw_problem_number,
    num_distinct,
    problem_of_number,
)
from pipeline_rl_jax.settings import ArithmeticSettings


def make_task(**changes):
    defaults = {
        "operations": "+",
        "min_operand": 0,
        "max_operand": 9,
        "num_operands": 2,
        "first_operand_tail": 0.0,
        "num_records": 50,
    }
    return ArithmeticSettings(**{**defaults, **changes})


def test_one_digit_sums_are_a_hundred():
    task = make_task()
    problems = [problem_of_number(task, number) for number in range(num_distinct(task))]
    assert len(problems) == len({problem.problem for problem in problems}) == 100
    for problem in problems:
        a, b = map(int, re.fullmatch(r"What is (\d) \+ (\d)\?", problem.problem).groups())
        assert problem.answer == str(a + b)


def test_every_number_is_another_problem_with_all_operations():
    task = make_task(operations="+-*", min_operand=-1, max_operand=1, num_operands=3)
    assert num_distinct(task) == 3**3 * 3**2
    problems = [problem_of_number(task, number) for number in range(num_distinct(task))]
    assert len({problem.problem for problem in problems}) == num_distinct(task)


@pytest.mark.parametrize(
    ("operands", "operations", "problem", "answer"),
    [
        ((2, 3, 4), "+*", "What is 2 + 3 * 4?", "14"),
        ((2, 3, 4), "*-", "What is 2 * 3 - 4?", "2"),
        ((2, 3, 4), "--", "What is 2 - 3 - 4?", "-5"),
        ((4, 3, 2), "-*", "What is 4 - 3 * 2?", "-2"),
        ((-2, 3, -4), "--", "What is (-2) - 3 - (-4)?", "-1"),
        ((2, -3, 4), "**", "What is 2 * (-3) * 4?", "-24"),
    ],
)
def test_products_come_first(operands, operations, problem, answer):
    task = make_task(operations="+-*", min_operand=-4, max_operand=4, num_operands=3)
    found = [
        candidate
        for number in range(num_distinct(task))
        if (candidate := problem_of_number(task, number)).problem == problem
    ]
    assert [candidate.answer for candidate in found] == [answer]


def test_a_record_depends_on_seed_and_index_only():
    task = make_task(min_operand=10, max_operand=99)
    forwards = [ArithmeticProblems(task, seed=3)[index].problem for index in range(20)]
    source = ArithmeticProblems(task, seed=3)
    assert [source[index].problem for index in reversed(range(20))][::-1] == forwards
    assert [ArithmeticProblems(task, seed=4)[i].problem for i in range(20)] != forwards
    assert len(source) == 50


def test_records_cover_the_space_evenly():
    source = ArithmeticProblems(make_task(num_records=5000), seed=0)
    counts: dict[str, int] = {}
    for index in range(len(source)):
        counts[source[index].problem] = counts.get(source[index].problem, 0) + 1
    assert len(counts) == 100  # 50 draws expected of each, standard deviation 7
    assert 20 < min(counts.values()) < max(counts.values()) < 85


def test_held_out_numbers_are_never_drawn():
    task = make_task(num_records=2000)
    held_out = frozenset(range(10))
    forbidden = {problem_of_number(task, number).problem for number in held_out}
    source = ArithmeticProblems(task, seed=0, held_out=held_out)
    drawn = {source[index].problem for index in range(len(source))}
    assert not drawn & forbidden
    assert len(drawn) == 90


def test_draws_are_the_same_on_every_machine():
    # Pinned: another stream would silently change every arithmetic run and resume.
    assert [draw_number(f"0/{index}/0", 100) for index in range(5)] == [10, 6, 20, 17, 69]
    assert draw_number("x", 10**60) < 10**60


def test_repeated_operations_count_once():
    assert num_distinct(make_task(operations="++")) == 100


def test_small_first_operands_are_likelier_with_a_tail():
    task = make_task(min_operand=2, max_operand=5, first_operand_tail=1.0)
    draws = [draw_problem_number(task, str(key)) for key in range(4000)]
    first = [divmod(number, 4)[1] for number in draws]
    second = [number // 4 for number in draws]
    # 1, 1/2, 1/3 and 1/4 of their sum 25/12; four standard deviations are below 0.04.
    for place, share in enumerate((12 / 25, 6 / 25, 4 / 25, 3 / 25)):
        assert abs(first.count(place) / len(draws) - share) < 0.04
        assert abs(second.count(place) / len(draws) - 0.25) < 0.04


def test_without_a_tail_a_draw_is_the_plain_number():
    task = make_task()
    assert draw_problem_number(task, "7/3/0") == draw_number("7/3/0", 100)

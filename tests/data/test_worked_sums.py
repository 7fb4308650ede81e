import itertools
import re

import pytest

from pipeline_rl_jax.data.worked_sums import ALPHABET, worked_sum
from pipeline_rl_jax.rewards.exact_number import final_number
from pipeline_rl_jax.settings import ArithmeticSettings


def make_task(first, last=None):
    """Sums whose operands are all `first`, or lie between the two."""
    return ArithmeticSettings(
        operations="+",
        min_operand=first,
        max_operand=last or first,
        num_operands=2,
        first_operand_tail=1.5,
        num_records=1,
    )


def test_one_is_moved_over_in_every_line():
    text = worked_sum(make_task(3), "any", slip_share=0.0)
    assert text.prompt == "What is 3 + 3?\n"
    assert text.completion == "2+4\n1+5\n0+6"


def test_the_grader_reads_the_last_number():
    for number in range(50):
        text = worked_sum(make_task(2, 48), f"{number}", slip_share=0.0)
        first, second = map(int, re.findall(r"\d+", text.prompt))
        assert final_number(text.completion) == first + second


def test_the_same_key_gives_the_same_text():
    task = make_task(2, 30)
    texts = [worked_sum(task, f"lesson/{n}", slip_share=0.5) for n in range(20)]
    assert texts == [worked_sum(task, f"lesson/{n}", slip_share=0.5) for n in range(20)]
    assert len({text.completion for text in texts}) > 10


def test_the_alphabet_suffices():
    task = make_task(2, 48)
    for number in range(200):
        text = worked_sum(task, f"lesson/{number}", slip_share=0.3)
        assert set(text.prompt + text.completion) <= set(ALPHABET)


def test_a_slip_counts_by_none_or_two_and_the_lines_go_on_from_there():
    task = make_task(20)
    steps = []
    for number in range(200):
        text = worked_sum(task, f"{number}", slip_share=0.3)
        totals = [20, *map(int, re.findall(r"\+(\d+)", text.completion))]
        steps += [after - before for before, after in itertools.pairwise(totals)]
    assert set(steps) == {0, 1, 2}
    # 4000 lines: the standard deviation of a share is below 0.01.
    assert steps.count(1) / len(steps) == pytest.approx(0.7, abs=0.03)
    assert steps.count(0) / len(steps) == pytest.approx(0.15, abs=0.03)

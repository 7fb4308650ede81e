import asyncio
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_rl_jax.rewards.exact_number import ExactNumber, final_number, gold_number
from tests.fakes.completions import make_text_completion


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        (" 7\n", 7),
        (" 3 + 4 = 7.", 7),
        ("1,234", 1234),
        ("12,345,678", 12345678),
        ("1{,}234", 1234),
        ("0, 1, 2", 2),
        ("1,2345", 2345),  # no thousands: a list
        ("-3", -3),
        ("\u22123", -3),  # the minus sign of Unicode
        (" 4 - 7 = -3.", -3),
        ("the sum is - 3", 3),  # a dash, not a sign
        (" = - 3", -3),
        ("5-3", 3),
        ("+7", 7),
        ("3.50", Fraction(7, 2)),
        (".5", Fraction(1, 2)),
        ("the answer is...7", 7),
        ("007", 7),
        ("$5", 5),
        (r"\$5", 5),
        ("-$1,234.50", Fraction(-2469, 2)),
        ("$-5", -5),
        ("50%", 50),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("2 1/2", Fraction(5, 2)),
        ("6.5 / 2", Fraction(13, 4)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\dfrac{1}{3}", Fraction(-1, 3)),
        (r"\frac12", Fraction(1, 2)),
        (r"2\frac{3}{4}", Fraction(11, 4)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("n = 4", 4),
        ("5 km", 5),
        ("H2O and CO2", None),
        ("1/0", None),
        ("seven", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("-Infinity", None),
        # which number counts: a box, then ####, then the last
        (r"I get \boxed{5}, so 6 is wrong", 5),
        (r"\boxed{5} or \boxed{6}", 6),
        (r"\boxed{\frac{1}{3}} of 2", Fraction(1, 3)),
        (r"\boxed{5\text{ apples}}", 5),
        (r"\boxed{x = 5}", 5),
        ("12 + 60 = 72\n#### 72\nChecked twice 9", 72),
        ("#### 72 clips in 2 months", 72),
        ("####\n72", 72),
        ("#### -1,200", -1200),
        ("12 #### none", None),
        # a box says exactly one number, or none
        (r"\boxed{2x}", None),
        (r"\boxed{3\sqrt{2}}", None),
        (r"\boxed{5, 6}", None),
        (r"\boxed{x-3}", None),
        (r"\boxed{x \ge 3}", None),
        (r"\boxed{}", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("72", 72),
        ("Natalia sold 48/2 = 24 clips.\n#### 72", 72),
        ("n = 4", 4),
        ("9 (apples)", 9),
        ("$5", 5),
        ("-3.50", Fraction(-7, 2)),
        (r"\boxed{8}", 8),
        (r"\frac{1}{3}", Fraction(1, 3)),
        ("3 or 4", None),
        (r"\frac{\pi}{2}", None),
        (r"2\sqrt{3}", None),
        ("x+3", None),
        ("", None),
    ],
)
def test_gold_number(answer, number):
    assert gold_number(answer) == number


@pytest.mark.parametrize(
    "text",
    [
        "1e999999999",
        "1e-999999999",
        "1e" + "9" * 10_000,
        "9" * 10_000,
        r"\frac{1e999999999}{3}",
        "1/1e999999999",
        "1," * 50_000,
        "-" * 100_000,
        "1" + " " * 100_000 + "/",
        ("1" + " " * 20) * 5_000,
        r"\text{" * 20_000,
        "#" * 100_000,
        r"\boxed{" + "(" * 100_000 + "1}",
        "1.1" * 50_000,
    ],
)
def test_nothing_hangs_or_fills_the_memory(text):
    start = time.process_time()
    number = final_number(text)
    assert time.process_time() - start < 2.0
    assert number is None or abs(number) < 10**301


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_read_in_every_spelling(value):
    for spelling in (f"{value}", f"{value:,}", f"{value}.", f"= {value}", f"{value}.00 dollars"):
        assert final_number(spelling) == value
        assert final_number(rf"\boxed{{{value:,}}}") == value
        assert gold_number(f"#### {value}") == value


@given(st.text(alphabet="0123456789.,-+/ eE=$\\{}fracboxed#"))
def test_any_text_is_read_without_an_error(text):
    final_number(text)
    gold_number(text)


def _score(text: str, answer: str):
    return asyncio.run(ExactNumber().score(make_text_completion(text, answer=answer)))


def test_the_score_compares_exactly():
    assert _score(" 3.5", "3.50").value == 1.0
    assert _score(r"\boxed{\frac{1}{3}}", r"\frac{1}{3}").value == 1.0
    assert _score(r"\boxed{\frac{1}{2}}", r"\frac{1}{3}").value == 0.0
    assert _score("0.3333333333333333", "1/3").value == 0.0
    assert _score("9007199254740993", "9007199254740992").value == 0.0  # equal as floats
    assert _score("3", "-3").value == 0.0
    assert _score("no idea", "3").value == 0.0


def test_a_gold_answer_without_a_number_is_an_error_and_not_a_wrong_answer():
    score = _score("3", r"\frac{\pi}{2}")
    assert score.error == "gold_not_a_number"
    assert r"\frac{\\pi}{2}" in score.detail or "pi" in score.detail

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_rl_jax.data.answer_text import after_marker, clean_answer, gold_answer, last_box


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),  # not cut at the first brace
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\fbox{9}", "9"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed {5}", "5"),
        (r"$\boxed 2$.", "2"),
        (r"$x = \boxed9$", "9"),
        (r"$\boxed 5\sqrt{2}$", r"5\sqrt{2}"),
        (r"$\boxed \frac{\sqrt{2}}{3}$", r"\frac{\sqrt{2}}{3}"),
        (r"\fbox{a \boxed 5}", "5"),
        (r"\boxed 5 is the answer", "5"),
        (r"\boxed{-3}", "-3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # escaped braces are no braces
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\\boxed{4}", "4"),  # escaped twice
        (r"\boxed{3} and again \boxed{4", "3"),  # cut by a limit: the last balanced one
        (r"\boxed{3 and again \boxed{4}", "4"),
        (r"} \boxed{6} {", "6"),
        (r"\boxed{}", ""),
        (r"$\fbox{4}$ and $\framebox{5}$", "5"),
        (r"It is $\boxed 9$.", "9"),
        (
            r"$\boxed{\left\{x \mid x > \frac{1}{2}\right\}}$",
            r"\left\{x \mid x > \frac{1}{2}\right\}",
        ),
        (r"$\boxed{\left\{ x \right.}$", r"\left\{ x \right."),
        (r"$\boxed{a\\{b}}$", r"a\\{b}"),
        (r"\boxed{4", None),
        (r"\boxedset{4}", None),
        ("boxed{4}", None),
        ("7", None),
        ("", None),
    ],
)
def test_last_box(text, content):
    assert last_box(text) == content


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 20_000,
        "\\boxed " * 20_000,
        "\\" * 200_000,
        "{" * 100_000 + "}" * 100_000,
        "\\boxed{" * 20_000 + "}" * 20_000,
        "\\boxed" + " " * 200_000,
        ("\\boxed x{" + "a" * 50) * 5_000,
    ],
)
def test_boxes_are_found_in_one_pass_whatever_the_model_wrote(text):
    start = time.process_time()
    last_box(text)
    assert time.process_time() - start < 2.0


@given(st.text(alphabet="\\boxedf{} $1a\n"))
def test_a_box_appended_to_any_closed_text_is_the_last(text):
    closed = text.replace("{", "").replace("}", "").replace("\\", "")
    assert last_box(closed + r" \boxed{1}") == "1"
    last_box(text)  # never raises


def test_after_marker():
    assert after_marker("6 * 12 = 72\n#### 72") == "72"
    assert after_marker("#### 1\n#### 2\nQuestion: 5") == "2"
    assert after_marker("####\n3") == "3"
    assert after_marker("####") == ""
    assert after_marker("### 72") is None


@pytest.mark.parametrize(
    ("answer", "bare"),
    [
        ("n = 4", "n = 4"),
        (" 72 ", "72"),
        ("#### 72", "72"),
        (r"It is $\boxed{\frac{3}{56}}.$", r"\frac{3}{56}"),
        (r"$\frac{1}{2}$", r"\frac{1}{2}"),
        (r"\(x+1\)", "x+1"),
        (r"\[ 5 \].", "5"),
        ("$5", "$5"),  # dollars, not mathematics
        (r"5\$", r"5\$"),
        ("", ""),
        (r"\boxed{}", ""),
    ],
)
def test_gold_answer_takes_off_every_wrapper_a_data_set_has(answer, bare):
    assert gold_answer(answer) == bare


def test_clean_answer_takes_off_latex_spacing():
    assert clean_answer(r"500\,000") == "500000"
    assert clean_answer(r"3\,\text{cm}\, ") == r"3 \text{cm}"
    assert clean_answer(r"\$5.") == r"\$5"
    assert clean_answer("$" * 2001) is not None

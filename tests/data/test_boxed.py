import pytest

from pipeline_rl_jax.data.boxed import last_box


@pytest.mark.parametrize(
    ("solution", "content"),
    [
        (r"It is $\boxed{7}$.", "7"),
        (r"$\boxed{\frac{1}{3}}$", r"\frac{1}{3}"),
        (r"$\boxed{1}$ or rather $\boxed{2}$", "2"),
        (r"$\fbox{4}$ and $\framebox{5}$", "5"),
        (r"It is $\boxed 9$.", "9"),
        (r"$\boxed{\{1, 2\}}$", r"\{1, 2\}"),
        (
            r"$\boxed{\left\{x \mid x > \frac{1}{2}\right\}}$",
            r"\left\{x \mid x > \frac{1}{2}\right\}",
        ),
        (r"$\boxed{3}$, cut off: $\boxed{\frac{1", "3"),
        (r"$\boxed{\left\{ x \right.}$", r"\left\{ x \right."),
        (r"$\boxed{a\\{b}}$", r"a\\{b}"),
        (r"$\boxed{}$", ""),
        ("no box", None),
        (r"\boxedthing{1}", None),
    ],
)
def test_the_last_box_whose_braces_balance(solution, content):
    assert last_box(solution) == content

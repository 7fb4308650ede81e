import math

import pytest

from pipeline_rl_jax.telemetry.figures import format_duration, format_number, format_share


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.12345, "0.123"), (12.34, "12.3"), (12345.6, "12,346"), (-250.0, "-250")],
)
def test_numbers(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf])
def test_unknown_is_a_dash(unknown):
    assert format_number(unknown) == format_share(unknown) == format_duration(unknown) == "–"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_shares():
    assert format_share(0.344) == "34%"

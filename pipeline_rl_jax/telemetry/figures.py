"""Figures as people read them, in the progress display and the summary."""

from __future__ import annotations

import math


def format_number(value: float | None) -> str:
    """Three significant digits, thousands grouped; a dash for what is not known."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_share(share: float | None) -> str:
    """Per cent without decimals."""
    return "–" if share is None or not math.isfinite(share) else f"{share:.0%}"


def format_duration(seconds: float | None) -> str:
    """`2 h 05 min`, `3 min 20 s` or `45 s`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

import struct

import pytest

from pipeline_rl_jax.evaluation import comparison_plots
from pipeline_rl_jax.evaluation.comparison_plots import NO_MATPLOTLIB, plot_comparison, smoothed

ROWS = [
    {
        "step": step,
        "run/samples": 8 * step,
        "run/train_seconds": 1.5 * step,
        "trainer/step_seconds": 1.5,
        "reward/mean": None if step == 2 else step / 10,
        "importance/ess_raw_share": 0.9,
        "lag/max_steps": step % 3,
    }
    for step in range(1, 6)
]


def test_smoothing_takes_the_last_values_and_skips_what_is_missing():
    assert smoothed([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]
    assert smoothed([None, 2.0, None, 4.0], 2) == [None, 2.0, 2.0, 4.0]
    assert smoothed([], 3) == []


def test_two_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    assert plot_comparison({"a": ROWS, "b": ROWS[:2]}, tmp_path, warmup_steps=1) == ""
    for name in ("reward.png", "on_policyness.png"):
        content = (tmp_path / name).read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", content[16:24])
        assert (width, height) == (1440, 540)


def test_without_matplotlib_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison_plots.importlib.util, "find_spec", lambda name: None)
    assert plot_comparison({"a": ROWS}, tmp_path, warmup_steps=1) == NO_MATPLOTLIB
    assert "\n" not in NO_MATPLOTLIB
    assert list(tmp_path.iterdir()) == []

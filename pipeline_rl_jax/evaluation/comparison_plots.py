"""Curves of a comparison as pictures, where matplotlib is installed (`pip install -e .[plots]`).

Owns what is drawn. The figures of the table are `run_figures.py`'s.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline_rl_jax.evaluation.run_figures import Metrics, steady_seconds

NO_MATPLOTLIB = "no plots: matplotlib is not installed; pip install 'pipeline-rl-jax[plots]'"
_SMOOTHED_STEPS = 5  # steps up to and with this one, over which a reward is averaged in plots


def plot_comparison(
    runs: Mapping[str, Sequence[Metrics]], directory: Path, *, warmup_steps: int
) -> str:
    """Writes reward.png and on_policyness.png. Returns "", or the line that says why not."""
    if importlib.util.find_spec("matplotlib") is None:
        return NO_MATPLOTLIB
    _plot(
        directory / "reward.png",
        {name: _reward_curves(rows, warmup_steps) for name, rows in runs.items()},
        labels=(("training seconds after warm-up", "reward"), ("samples", "reward")),
    )
    _plot(
        directory / "on_policyness.png",
        {name: _policy_curves(rows) for name, rows in runs.items()},
        labels=(("step", "ESS of raw ratios"), ("step", "max lag [steps]")),
    )
    return ""


_Curve = tuple[Sequence[float], Sequence[float | None]]


def _reward_curves(rows: Sequence[Metrics], warmup_steps: int) -> tuple[_Curve, _Curve]:
    rewards = smoothed([row.get("reward/mean") for row in rows], _SMOOTHED_STEPS)
    seconds = steady_seconds(rows, warmup_steps=warmup_steps)
    return (seconds, rewards), ([row["run/samples"] for row in rows], rewards)


def _policy_curves(rows: Sequence[Metrics]) -> tuple[_Curve, _Curve]:
    steps = [row["step"] for row in rows]
    return (
        (steps, [row.get("importance/ess_raw_share") for row in rows]),
        (steps, [row.get("lag/max_steps") for row in rows]),
    )


def smoothed(values: Sequence[float | None], window: int) -> list[float | None]:
    """Mean of the last `window` values up to each, leaving out what is None."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        present = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(sum(present) / len(present) if present else None)
    return means


def _plot(
    path: Path, runs: Mapping[str, tuple[_Curve, _Curve]], *, labels: Sequence[tuple[str, str]]
) -> None:
    """Two panels side by side, one line a run in each."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for place, (axis, (along, height)) in enumerate(zip(axes, labels, strict=True)):
        for name, curves in runs.items():
            x, y = curves[place]
            axis.plot(x, [float("nan") if value is None else value for value in y], label=name)
        axis.set_xlabel(along)
        axis.set_ylabel(height)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

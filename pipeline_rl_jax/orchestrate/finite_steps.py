"""Optimizer steps whose loss or gradient is not finite: what becomes of a run that takes them.

Owns the judgement of a step, the warning, and how many in a row end the run. That such an update
leaves the weights as they were is the trainer's doing (`trainer/gradients.py`); that no checkpoint
is taken after it, the observer's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from pipeline_rl_jax.orchestrate.failures import HopelessRun

_MAX_IN_A_ROW = 5
_MEASURES = ("trainer/loss", "trainer/gradient_norm", "value/gradient_norm")

_log = logging.getLogger(__name__)


class StepsLeftOut(HopelessRun):
    """Steps from `first_version` on have changed nothing."""

    def __init__(self, message: str, *, first_version: int) -> None:
        super().__init__(message)
        self.first_version = first_version  # weight version after the first of them


def is_finite_step(metrics: Mapping[str, float]) -> bool:
    """False when an update of the step was left out. A mean over updates tells of any of them."""
    return all(math.isfinite(metrics.get(name, 0.0)) for name in _MEASURES)


class FiniteSteps:
    """Counts the steps in a row that were not finite."""

    def __init__(self) -> None:
        self._num_left_out = 0

    def add(self, version: int, metrics: Mapping[str, float]) -> None:
        """After a step. Warns at the first of a row; `StepsLeftOut` when the row gets too long."""
        if is_finite_step(metrics):
            self._num_left_out = 0
            return
        self._num_left_out += 1
        if self._num_left_out == 1:
            _log.warning(
                "step %d: loss or gradient is NaN or infinite, so its update is left out and no "
                "checkpoint taken; %d such steps in a row end the run",
                version,
                _MAX_IN_A_ROW,
            )
        if self._num_left_out == _MAX_IN_A_ROW:
            first = version - _MAX_IN_A_ROW + 1
            raise StepsLeftOut(
                f"loss or gradient was NaN or infinite in steps {first} to {version}, so no update "
                "was made; lower trainer.learning_rate, or look for what is not finite in the "
                "rewards, the data or the weights of model.source",
                first_version=first,
            )

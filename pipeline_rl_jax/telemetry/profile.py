"""Records a JAX profile of chosen optimizer steps, for TensorBoard's profile plugin.

Owns when the profiler runs. The named spans inside a profile come from `spans.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from pipeline_rl_jax.settings import ProfileSettings

_LOGGER = logging.getLogger(__name__)
_HOST_EVENTS = 2  # host tracer level: our spans and the runtime's own events
_NO_PYTHON_CALLS = 0  # a profile of every Python call is hundreds of megabytes a step


class ProfileWindow:
    """Starts the profiler before step `start_step` and stops it after `num_steps` steps.

    A run that resumes inside the window profiles what is left of it.
    """

    def __init__(self, settings: ProfileSettings, directory: Path) -> None:
        self._steps = range(settings.start_step, settings.start_step + settings.num_steps)
        self._directory = directory
        self._running = False

    def before_step(self, step: int) -> None:
        """Call before optimizer step `step` (from 1) is dispatched."""
        if step in self._steps and not self._running:
            options = jax.profiler.ProfileOptions()
            options.host_tracer_level = _HOST_EVENTS
            options.python_tracer_level = _NO_PYTHON_CALLS
            jax.profiler.start_trace(str(self._directory), profiler_options=options)
            self._running = True

    def after_step(self, step: int) -> None:
        """Call once the results of step `step` are on the host, so that its work is recorded."""
        if self._running and step + 1 >= self._steps.stop:
            self.close()

    def close(self) -> None:
        """Writes what was recorded so far; does nothing when the profiler is not running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            _LOGGER.info("wrote a JAX profile to %s", self._directory)

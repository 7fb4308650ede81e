"""Readies the devices that settings ask for, before JAX starts.

Which device belongs to which mesh is in `pipeline_rl_jax/meshes.py`.
"""

from __future__ import annotations

import jax

from pipeline_rl_jax.meshes import configure_virtual_devices
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.settings_meshes import check_devices


def start_devices(settings: Settings) -> None:
    """Splits the CPU if asked to, starts JAX, and checks that every device named is there.

    Raises `SettingsError` when a mesh names a device that this process does not have.
    """
    num_virtual = settings.meshes.virtual_devices
    if num_virtual:
        # Virtual devices are parts of the CPU, also on a machine with a GPU.
        jax.config.update("jax_platforms", "cpu")
        configure_virtual_devices(num_virtual)
    check_devices(settings, jax.device_count())

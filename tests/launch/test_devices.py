import jax
import pytest

from devices import start_devices
from pipeline_rl_jax.settings import SettingsError
from tests.fakes.settings import make_settings


def test_devices_that_are_there():
    assert jax.device_count() == 8  # set for all tests
    start_devices(make_settings(meshes={"virtual_devices": 8, "generation_devices": (7,)}))


def test_a_device_that_is_not_there():
    settings = make_settings(meshes={"generation_devices": (8,)})
    with pytest.raises(SettingsError, match=r"names device 8 but this process has 8: use indices"):
        start_devices(settings)

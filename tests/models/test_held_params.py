import jax
import numpy as np

from pipeline_rl_jax.models.held_params import HeldParams


def make_params():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    return jax.device_put({"layer": {"w": np.arange(6.0, dtype=np.float32)}}, sharding)


def test_held_on_the_devices_they_are_what_was_given():
    params = make_params()
    held = HeldParams(params, offloaded=False)
    with held.on_devices() as first, held.on_devices() as second:
        assert first is params
        assert second is params
    assert not params["layer"]["w"].is_deleted()


def test_offloaded_they_are_on_the_devices_only_while_they_are_used():
    params = make_params()
    held = HeldParams(params, offloaded=True)
    assert params["layer"]["w"].is_deleted()
    for _ in range(2):
        with held.on_devices() as placed:
            weight = placed["layer"]["w"]
            assert weight.devices() == {jax.devices()[3]}
            np.testing.assert_array_equal(weight, np.arange(6.0))
        assert weight.is_deleted()

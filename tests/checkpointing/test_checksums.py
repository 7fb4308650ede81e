import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pipeline_rl_jax.checkpointing.checksums import bit_sums
from tests.fakes.tiny_training import tiny_meshes


def test_the_sum_of_the_words_modulo_their_number():
    tensors = {
        "whole": np.array([1, 2, -1], np.int32),  # -1 is 2^32 - 1
        "one": np.float32(1.0),  # 0x3f800000
        "half": np.array([1.0, 2.0], jnp.bfloat16),  # 0x3f80 + 0x4000
    }
    wanted = {"whole": 2, "one": 0x3F800000, "half": 0x7F80}
    assert bit_sums(tensors) == wanted
    assert bit_sums({name: jnp.asarray(tensor) for name, tensor in tensors.items()}) == wanted


@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")]
)
def test_the_layout_on_devices_does_not_matter(spec):
    values = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    mesh = tiny_meshes(trainer_devices=(0, 1)).trainer
    placed = jax.device_put(values, NamedSharding(mesh, spec))
    assert bit_sums({"a": placed}) == bit_sums({"a": values})


def test_one_bit_shows():
    values = np.ones(10, np.float32)
    changed = values.copy()
    changed.view(np.uint32)[7] ^= 1
    assert bit_sums({"a": values}) != bit_sums({"a": changed})

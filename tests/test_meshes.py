import subprocess
import sys

import jax
import numpy as np
import pytest

from pipeline_rl_jax.meshes import (
    build_meshes,
    configure_virtual_devices,
    num_row_parts,
    replicated,
    row_sharding,
)
from pipeline_rl_jax.settings import GenerationMeshSettings, MeshSettings, TrainerMeshSettings


def mesh_settings(
    trainer_devices=(0,),
    generation_devices=(0,),
    trainer=(1, -1, 1),
    generation=(-1, 1),
    reference_devices=(),
    scoring_devices=(),
) -> MeshSettings:
    return MeshSettings(
        virtual_devices=8,
        trainer_devices=trainer_devices,
        generation_devices=generation_devices,
        reference_devices=reference_devices,
        critic_devices=(),
        offloaded=(),
        scoring_devices=scoring_devices,
        trainer=TrainerMeshSettings(data=trainer[0], fsdp=trainer[1], tensor=trainer[2]),
        generation=GenerationMeshSettings(data=generation[0], tensor=generation[1]),
    )


def device_ids(mesh: jax.sharding.Mesh) -> list:
    return [[device.id for device in row] for row in mesh.devices.reshape(len(mesh.devices), -1)]


def test_both_sides_may_be_one_device():
    meshes = build_meshes(mesh_settings())
    assert meshes.trainer.shape == {"data": 1, "fsdp": 1, "tensor": 1}
    assert meshes.generation.shape == {"data": 1, "tensor": 1}
    assert meshes.trainer.devices.ravel()[0] == meshes.generation.devices.ravel()[0]


def test_the_reference_has_the_trainers_mesh_or_devices_of_its_own():
    meshes = build_meshes(mesh_settings())
    assert meshes.reference is meshes.trainer
    own = build_meshes(mesh_settings((0, 1), (2,), reference_devices=(5, 4))).reference
    assert own.shape == {"data": 1, "fsdp": 2, "tensor": 1}
    assert device_ids(own) == [[5, 4]]
    with pytest.raises(ValueError, match=r"reference_devices \(1, 3\) shares \[1\]"):
        build_meshes(mesh_settings((0, 1), (2,), reference_devices=(1, 3)))


def test_a_reward_model_may_share_the_devices_of_the_reference():
    meshes = build_meshes(mesh_settings((0, 1), (2,)))
    assert meshes.scoring is meshes.trainer
    meshes = build_meshes(
        mesh_settings((0, 1), (2,), reference_devices=(4, 5), scoring_devices=(5, 6))
    )
    assert device_ids(meshes.scoring) == [[5, 6]]
    with pytest.raises(ValueError, match=r"scoring_devices \(3, 2\) shares \[2\]"):
        build_meshes(mesh_settings((0, 1), (2,), scoring_devices=(3, 2)))


def test_listed_devices_fill_the_axes_in_order():
    meshes = build_meshes(
        mesh_settings((4, 5, 6, 7), (3, 1), trainer=(2, -1, 2), generation=(-1, 2))
    )
    assert meshes.trainer.shape == {"data": 2, "fsdp": 1, "tensor": 2}
    assert device_ids(meshes.trainer) == [[4, 5], [6, 7]]
    assert meshes.generation.shape == {"data": 1, "tensor": 2}
    assert device_ids(meshes.generation) == [[3, 1]]


def test_given_devices_are_indexed_instead_of_all():
    devices = jax.devices()[6:]
    meshes = build_meshes(mesh_settings((0,), (1,)), devices)
    assert device_ids(meshes.trainer) == [[6]]
    assert device_ids(meshes.generation) == [[7]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (mesh_settings((0, 8)), r"meshes.trainer_devices \(0, 8\) must be .* 8 device"),
        (mesh_settings((0,), (-1,)), r"meshes.generation_devices \(-1,\) must be"),
        (mesh_settings((0,), ()), r"meshes.generation_devices \(\) must be"),
        (mesh_settings((1, 1)), r"meshes.trainer_devices \(1, 1\) must list every device once"),
        (mesh_settings((0, 1), (1, 2)), r"share \[1\]; give each side devices of its own"),
        (mesh_settings((0, 1), (0,)), r"share \[0\]"),
        (mesh_settings((0, 1, 2), (3,), trainer=(2, -1, 1)), r"meshes.trainer \(data=2, fsdp=-1"),
        (mesh_settings((0, 1), (3,), trainer=(1, 1, 1)), r"multiply to the 2 device\(s\)"),
        (mesh_settings((0, 1), (3,), trainer=(-1, -1, 1)), "set one axis to -1"),
        (mesh_settings((0,), (3, 4), generation=(0, 1)), r"meshes.generation \(data=0"),
    ],
)
def test_what_does_not_fit_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        build_meshes(settings)


def test_rows_are_split_over_data_and_fsdp_and_not_over_tensor():
    mesh = build_meshes(mesh_settings((0, 1, 2, 3, 4, 5), (7,), trainer=(1, 3, 2))).trainer
    assert num_row_parts(mesh) == 3
    rows = jax.device_put(np.arange(12).reshape(6, 2), row_sharding(mesh))
    parts = {shard.device.id: shard.data[:, 0].tolist() for shard in rows.addressable_shards}
    assert parts == {0: [0, 2], 1: [0, 2], 2: [4, 6], 3: [4, 6], 4: [8, 10], 5: [8, 10]}
    stacked = jax.device_put(np.zeros((2, 6, 4)), row_sharding(mesh, row_axis=1))
    assert {shard.data.shape for shard in stacked.addressable_shards} == {(2, 2, 4)}
    whole = jax.device_put(np.int32(3), replicated(mesh))
    assert len(whole.addressable_shards) == 6


def test_virtual_devices_cannot_change_once_jax_has_started():
    assert jax.device_count() == 8
    configure_virtual_devices(0)
    configure_virtual_devices(8)
    with pytest.raises(ValueError, match=r"meshes.virtual_devices \(4\).* started with 8 device"):
        configure_virtual_devices(4)


def test_virtual_devices_are_made_before_jax_starts():
    program = (
        "from pipeline_rl_jax.meshes import configure_virtual_devices\n"
        "configure_virtual_devices(3)\n"
        "import jax\n"
        "print(jax.device_count())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["3"]

import asyncio
import contextlib
import logging
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from pipeline_rl_jax.checkpointing.store import CheckpointStore, restore_params
from pipeline_rl_jax.meshes import Meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.trainer.optimizer import build_optimizer
from pipeline_rl_jax.trainer.state import TrainState, abstract_state
from pipeline_rl_jax.trainer.trainer import Trainer
from tests.fakes.tiny_training import TINY, tiny_batch, tiny_meshes, tiny_settings, tiny_trainer

ONE_DEVICE = tiny_meshes()
SETTINGS = tiny_settings(checkpointing={"max_to_keep": 2})


def like(
    settings: Settings = SETTINGS, *, meshes: Meshes = ONE_DEVICE, config: ModelConfig = TINY
) -> TrainState:
    optimizer = build_optimizer(settings.trainer, num_steps=settings.schedule.num_steps)
    return abstract_state(optimizer, config=config, mesh=meshes.trainer)


def resumed(state: TrainState, *, meshes: Meshes = ONE_DEVICE) -> Trainer:
    optimizer = build_optimizer(SETTINGS.trainer, num_steps=SETTINGS.schedule.num_steps)
    return Trainer(TINY, SETTINGS, optimizer=optimizer, mesh=meshes.trainer, state=state)


def assert_equal_trees(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def store(tmp_path: Path):
    opened = CheckpointStore(tmp_path / "checkpoints", SETTINGS)
    yield opened
    opened.close()


def state_at(version: int) -> TrainState:
    """A state of that step whose every number tells the version and the tensor it belongs to."""
    leaves, structure = jax.tree.flatten(like())
    values = [
        np.full(leaf.shape, version if leaf.ndim == 0 else 100 * version + index, leaf.dtype)
        for index, leaf in enumerate(leaves)
    ]
    placed = [jax.device_put(v, leaf.sharding) for v, leaf in zip(values, leaves, strict=True)]
    return jax.tree.unflatten(structure, placed)


def save_versions(store: CheckpointStore, *versions: int) -> dict[int, dict]:
    """Saves `state_at` each version; the params of each."""
    states = {version: state_at(version) for version in versions}
    for version, state in states.items():
        assert store.save(state, {"version": version})
    store.wait()
    return {version: jax.device_get(state.params) for version, state in states.items()}


def damage(checkpoint: Path) -> None:
    """Cuts every data file of the weights short, as a full disk would."""
    for path in (checkpoint / "params").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:10])


def test_a_resumed_run_is_the_run_that_was_never_stopped(store):
    trainer = tiny_trainer(SETTINGS, ONE_DEVICE)
    trainer.train(tiny_batch())
    metadata = {"version": 1, "prompts": {"next": 17, "open": [3, 5]}, "totals": {"seconds": 1.5}}
    store.save(trainer.state, metadata)
    for seed in (1, 2):  # the saved buffers are given up while they are being written
        trainer.train(tiny_batch(seed=seed))
    restored = store.restore_latest(like())
    assert restored.metadata == metadata
    again = resumed(restored.state)
    assert again.version == 1
    for seed in (1, 2):
        again.train(tiny_batch(seed=seed))
    assert_equal_trees(jax.device_get(again.state), jax.device_get(trainer.state))


def test_another_mesh_may_go_on(store):
    saved = jax.device_get(state_at(1))
    save_versions(store, 1)
    meshes = tiny_meshes(trainer_devices=(0, 1, 2, 3), trainer=(1, 2, 2))
    state = store.restore_latest(like(meshes=meshes)).state
    assert_equal_trees(jax.device_get(state), saved)
    gate = state.opt_state[1].mu["layers"]["gate"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 16, 32)}
    assert len(gate.sharding.device_set) == 4


def test_a_fresh_directory_has_nothing_to_restore(store):
    assert store.restore_latest(like()) is None


def test_a_version_is_saved_once(store):
    assert store.save(state_at(1), {"version": 1})
    assert not store.save(state_at(1), {"version": 1})


def test_version_and_state_must_agree(store):
    with pytest.raises(ValueError, match="a state of step 1 cannot be saved as version 7"):
        store.save(state_at(1), {"version": 7})


def test_saving_works_within_an_event_loop(store):
    async def save() -> None:
        store.save(state_at(1), {"version": 1})

    asyncio.run(save())
    assert int(store.restore_latest(like()).state.step) == 1


def test_the_newest_are_kept_and_a_save_that_fails_costs_no_older_one(tmp_path):
    settings = tiny_settings(checkpointing={"max_to_keep": 1})
    directory = tmp_path / "checkpoints"
    store = CheckpointStore(directory, settings)
    params = save_versions(store, 1, 2)
    assert sorted(path.name for path in directory.iterdir()) == ["2"]
    with file_size_limit(2048), pytest.raises((OSError, ValueError)):
        save_versions(store, 3)
    reopened = CheckpointStore(directory, settings)
    assert_equal_trees(jax.device_get(reopened.restore_latest(like()).state.params), params[2])
    reopened.close()


@contextlib.contextmanager
def file_size_limit(num_bytes: int):
    """Writing beyond it fails in this process, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_a_killed_save_left_is_ignored(tmp_path):
    directory = tmp_path / "checkpoints"
    store = CheckpointStore(directory, SETTINGS)
    save_versions(store, 1)
    store.close()
    shutil.copytree(directory / "1", directory / "2.orbax-checkpoint-tmp")
    (directory / "notes").mkdir()
    reopened = CheckpointStore(directory, SETTINGS)
    assert int(reopened.restore_latest(like()).state.step) == 1
    reopened.close()


def test_a_damaged_checkpoint_is_passed_over_named_and_can_be_written_again(tmp_path, caplog):
    directory = tmp_path / "checkpoints"
    store = CheckpointStore(directory, SETTINGS)
    params = save_versions(store, 1, 2)
    damage(directory / "2")
    with caplog.at_level(logging.WARNING):
        restored = store.restore_latest(like())
    assert f"checkpoint {directory / '2'} is damaged" in caplog.text
    assert_equal_trees(jax.device_get(restored.state.params), params[1])
    assert sorted(path.name for path in directory.iterdir()) == ["1", "damaged_2"]
    save_versions(store, 2)
    assert_equal_trees(restore_params(directory), params[2])
    store.close()


@pytest.mark.parametrize("missing", ["record", "optimizer", "params"])
def test_a_checkpoint_that_lacks_an_item_is_damaged(store, tmp_path, missing):
    save_versions(store, 1, 2)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / missing)
    assert int(store.restore_latest(like()).state.step) == 1


@pytest.mark.parametrize("text", ["{}", "[]", '{"run": 1, "tensors": {}, "settings": {}}'])
def test_a_checkpoint_whose_record_lacks_a_part_is_damaged(store, tmp_path, text):
    save_versions(store, 1, 2)
    (path,) = (tmp_path / "checkpoints" / "2" / "record").glob("metadata")
    path.write_text(text)
    assert int(store.restore_latest(like()).state.step) == 1
    assert store.versions == [1]


def change_weights(checkpoint: Path, params: dict) -> None:
    """Rewrites the weights, as whole files, with one value changed."""
    changed = jax.tree.map(np.array, params)
    changed["layers"]["up"][1, 2, 3] += 1
    shutil.rmtree(checkpoint / "params")
    with ocp.StandardCheckpointer() as writer:
        writer.save(checkpoint / "params", changed)


def test_a_checkpoint_with_other_values_than_were_saved_is_damaged(store, tmp_path, caplog):
    params = save_versions(store, 1, 2)
    change_weights(tmp_path / "checkpoints" / "2", params[2])
    assert int(restore_params(tmp_path / "checkpoints")["layers"]["up"][0, 0, 0]) < 200
    assert int(store.restore_latest(like()).state.step) == 1
    assert "tensors are not what was saved, among them params.layers.up" in caplog.text


def test_a_checkpoint_under_another_number_is_damaged(store, tmp_path):
    save_versions(store, 1, 2)
    shutil.copytree(tmp_path / "checkpoints" / "2", tmp_path / "checkpoints" / "9")
    again = CheckpointStore(tmp_path / "checkpoints", SETTINGS)
    assert int(again.restore_latest(like()).state.step) == 2
    again.close()


def test_only_damaged_checkpoints_are_an_error_and_no_fresh_start(store, tmp_path):
    save_versions(store, 1)
    damage(tmp_path / "checkpoints" / "1")
    with pytest.raises(ValueError, match="none of which can be read; move it away to start anew"):
        store.restore_latest(like())
    assert (tmp_path / "checkpoints" / "1").is_dir()


def test_another_model_is_refused_by_name(store):
    save_versions(store, 1)
    deeper = ModelConfig(**(vars(TINY) | {"num_layers": 3, "qkv_bias": False}))
    with pytest.raises(ValueError, match=r"1 belongs to another model: .* another --workdir"):
        store.restore_latest(like(config=deeper))
    wider = ModelConfig(**(vars(TINY) | {"mlp_width": 128}))
    with pytest.raises(ValueError, match=r"float32\[2, 64, 32\] there and float32\[2, 128, 32\]"):
        store.restore_latest(like(config=wider))


def test_other_settings_are_told_and_accepted(tmp_path, caplog):
    store = CheckpointStore(tmp_path, SETTINGS)
    save_versions(store, 1)
    store.close()
    changed = tiny_settings(trainer={"learning_rate": 0.5}, checkpointing={"max_to_keep": 2})
    reopened = CheckpointStore(tmp_path, changed)
    with caplog.at_level(logging.WARNING):
        assert reopened.restore_latest(like()) is not None
    told = [record.getMessage() for record in caplog.records if "setting" in record.getMessage()]
    assert [line.partition("setting: ")[2] for line in told] == [
        "trainer.learning_rate: 0.01 -> 0.5"
    ]
    reopened.close()


def test_weights_alone_come_back_as_numpy(store, tmp_path):
    params = save_versions(store, 1, 3)
    directory = tmp_path / "checkpoints"
    newest = restore_params(directory)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(newest))
    assert_equal_trees(newest, params[3])
    assert_equal_trees(restore_params(directory, 1), params[1])
    with pytest.raises(ValueError, match="no checkpoint of version 2; it has 1, 3"):
        restore_params(directory, 2)


def test_weights_of_a_damaged_or_missing_checkpoint(store, tmp_path):
    with pytest.raises(ValueError, match="is no directory"):
        restore_params(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        restore_params(tmp_path / "checkpoints")
    params = save_versions(store, 1, 2)
    damage(tmp_path / "checkpoints" / "2")
    assert_equal_trees(restore_params(tmp_path / "checkpoints"), params[1])
    assert (tmp_path / "checkpoints" / "2").is_dir()
    with pytest.raises(ValueError, match=r"2 is damaged"):
        restore_params(tmp_path / "checkpoints", 2)

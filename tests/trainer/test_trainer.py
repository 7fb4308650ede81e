import jax
import numpy as np

from tests.fakes.tiny_training import tiny_batch, tiny_meshes, tiny_settings, tiny_trainer


def test_versions_count_steps_and_each_step_starts_from_the_last_ones_weights():
    trainer = tiny_trainer(tiny_settings(), tiny_meshes())
    assert trainer.version == 0
    outputs = [trainer.train(tiny_batch()) for _ in range(4)]
    assert [output.version for output in outputs] == [1, 2, 3, 4]
    assert trainer.version == int(trainer.state.step) == 4
    losses = [output.fetch()["trainer/loss"] for output in outputs]
    assert len(set(losses)) == 4


def test_a_step_needs_no_hidden_transfer():
    trainer = tiny_trainer(tiny_settings(), tiny_meshes())
    with jax.transfer_guard("disallow"):
        outputs = [trainer.train(tiny_batch()), trainer.train(tiny_batch(5, padded_rows=8))]
        metrics = [output.fetch() for output in outputs]
    assert all(isinstance(value, float) for value in metrics[0].values())


def test_the_state_before_a_step_is_given_up():
    trainer = tiny_trainer(tiny_settings(), tiny_meshes())
    before = trainer.state.params["layers"]["gate"]
    trainer.train(tiny_batch())
    trainer.wait()
    assert before.is_deleted()
    assert not trainer.state.params["layers"]["gate"].is_deleted()


def test_equal_batches_give_equal_runs():
    runs = []
    for _ in range(2):
        trainer = tiny_trainer(tiny_settings(), tiny_meshes())
        for seed in range(3):
            trainer.train(tiny_batch(seed=seed))
        runs.append(jax.device_get(trainer.state.params))
    for left, right in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(runs[1]), strict=True):
        np.testing.assert_array_equal(left, right)


def test_weights_in_bfloat16_train_with_moments_in_float32():
    settings = tiny_settings(model={"param_dtype": "bfloat16"})
    trainer = tiny_trainer(settings, tiny_meshes())
    before = jax.device_get(trainer.state.params)
    losses = [trainer.train(tiny_batch()).fetch()["trainer/loss"] for _ in range(3)]
    assert len(set(losses)) == 3
    after = jax.device_get(trainer.state.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {"bfloat16"}
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    moments = [x for x in jax.tree.leaves(trainer.state.opt_state) if x.ndim]
    assert {moment.dtype.name for moment in moments} == {"float32"}

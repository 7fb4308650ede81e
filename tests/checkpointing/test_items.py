import jax
import pytest

from pipeline_rl_jax.checkpointing.items import (
    changed_settings,
    describe_tensors,
    join_state,
    require_same_tensors,
    split_state,
)
from tests.fakes.tiny_training import tiny_meshes, tiny_settings, tiny_trainer


def test_join_undoes_split():
    state = tiny_trainer(tiny_settings(), tiny_meshes()).state
    items = split_state(state)
    assert items["optimizer"]["opt_state.1.mu.layers.gate"].shape == (2, 32, 64)
    joined = join_state(items, state)
    assert jax.tree.structure(joined) == jax.tree.structure(state)
    for left, right in zip(jax.tree.leaves(joined), jax.tree.leaves(state), strict=True):
        assert left is right


def test_a_critic_goes_with_the_optimizer_and_not_with_the_exported_params():
    settings = tiny_settings(algorithm={"baseline": "gae", "critic": "model"})
    state = tiny_trainer(settings, tiny_meshes()).state
    items = split_state(state)
    assert not [name for name in items["params"] if "critic" in name]
    assert items["optimizer"]["critic.params.value_head.head_weight"].shape == (32,)
    assert "critic.opt_state.1.mu.layers.gate" in items["optimizer"]
    joined = join_state(items, state)
    assert jax.tree.structure(joined) == jax.tree.structure(state)
    for left, right in zip(jax.tree.leaves(joined), jax.tree.leaves(state), strict=True):
        assert left is right


def test_tensors_are_described_with_the_item_they_lie_in():
    tensors = describe_tensors(tiny_trainer(tiny_settings(), tiny_meshes()).state)
    assert tensors["params.layers.gate"] == {"shape": [2, 32, 64], "dtype": "float32"}
    assert tensors["optimizer.step"] == {"shape": [], "dtype": "int32"}


def test_differences_are_named_and_long_lists_cut():
    def tensor(*shape: int) -> dict:
        return {"shape": list(shape), "dtype": "float32"}

    saved = {"a": tensor(1), "b": tensor(2), "gone": tensor(3)}
    require_same_tensors(saved, dict(saved), origin="run/5")
    wanted = {"a": tensor(1), "b": tensor(4), "new": tensor(3)}
    with pytest.raises(ValueError, match=r"run/5 belongs to another model") as caught:
        require_same_tensors(saved, wanted, origin="run/5")
    assert "b is float32[2] there and float32[4] here" in str(caught.value)
    assert "gone is float32[3] there and missing here" in str(caught.value)
    assert "new is missing there and float32[3] here" in str(caught.value)
    many = {str(index): tensor(index) for index in range(9)}
    with pytest.raises(ValueError, match="and 6 more"):
        require_same_tensors(many, {}, origin="run/5")


def test_changed_settings_are_listed_by_path():
    saved = {"seed": 1, "trainer": {"learning_rate": 0.1, "beta1": 0.9}}
    current = {"seed": 1, "trainer": {"learning_rate": 0.2, "beta1": 0.9}, "new": 3}
    assert changed_settings(saved, current) == [
        "new: None -> 3",
        "trainer.learning_rate: 0.1 -> 0.2",
    ]
    assert changed_settings(saved, saved) == []

import jax
import numpy as np

from pipeline_rl_jax.trainer.optimizer import build_optimizer
from pipeline_rl_jax.trainer.state import abstract_state
from tests.fakes.tiny_training import TINY, tiny_meshes, tiny_settings, tiny_trainer

FSDP_AND_TENSOR = tiny_meshes(trainer_devices=(0, 1, 2, 3), trainer=(1, 2, 2))


def test_moments_lie_like_the_weights_they_belong_to():
    state = tiny_trainer(tiny_settings(), FSDP_AND_TENSOR).state
    for params in (state.params, state.opt_state[1].mu, state.opt_state[1].nu):
        gate = params["layers"]["gate"]
        assert gate.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
        assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 16, 32)}
        assert params["final_norm"].sharding.is_fully_replicated
    assert int(state.step) == int(state.skipped_steps) == 0
    assert all(np.all(moment == 0) for moment in jax.tree.leaves(state.opt_state))


def test_the_abstract_state_is_the_real_one_without_its_values():
    settings = tiny_settings()
    state = tiny_trainer(settings, FSDP_AND_TENSOR).state
    optimizer = build_optimizer(settings.trainer, num_steps=settings.schedule.num_steps)
    abstract = abstract_state(optimizer, config=TINY, mesh=FSDP_AND_TENSOR.trainer)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for like, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (like.shape, like.dtype) == (leaf.shape, leaf.dtype)
        assert like.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_a_value_head_is_part_of_the_state_and_starts_at_zero():
    settings = tiny_settings(algorithm={"baseline": "value"}, model={"param_dtype": "bfloat16"})
    state = tiny_trainer(settings, FSDP_AND_TENSOR).state
    head = state.params["value_head"]
    assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in head.items()} == {
        "head_bias": ((), "float32"),
        "head_weight": ((TINY.width,), "float32"),
    }
    assert not any(np.any(leaf) for leaf in head.values())
    assert head["head_weight"].sharding.is_fully_replicated
    assert "value_head" in state.opt_state[1].mu
    optimizer = build_optimizer(settings.trainer, num_steps=settings.schedule.num_steps)
    abstract = abstract_state(
        optimizer,
        config=TINY,
        mesh=FSDP_AND_TENSOR.trainer,
        param_dtype="bfloat16",
        value_head=True,
    )
    for like, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (like.shape, like.dtype) == (leaf.shape, leaf.dtype)

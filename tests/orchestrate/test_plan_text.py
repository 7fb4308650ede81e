"""Memory estimates against hand-computed bytes."""

import dataclasses
from pathlib import Path

import jax

from pipeline_rl_jax.data.vocabulary import own_tokens
from pipeline_rl_jax.meshes import build_meshes
from pipeline_rl_jax.orchestrate.plan_text import (
    critic_bytes,
    generation_bytes,
    reference_bytes,
    scoring_bytes,
    trainer_bytes,
)
from pipeline_rl_jax.orchestrate.scoring_model import ScoringModel
from tests.fakes.settings import make_settings
from tests.fakes.tiny_engine import TINY


def meshes(settings):
    return build_meshes(settings.meshes, jax.devices())


def test_trainer_memory_splits_over_fsdp_and_tensor():
    settings = make_settings(
        trainer={"tokens_per_row": 64, "rows_per_micro_batch": 4},
        model={"compute_dtype": "float32", "remat": "full"},
    )
    one = trainer_bytes(settings, TINY, meshes(settings))
    assert one["weights"] == 4 * TINY.num_parameters
    assert one["AdamW moments (float32)"] == 2 * one["weights"]
    assert one["activations of a micro-batch"] == 4 * 64 * TINY.num_layers * TINY.width * 4
    mesh = dataclasses.replace(
        settings.meshes,
        trainer_devices=(0, 1, 2, 3),
        generation_devices=(4,),
        trainer=dataclasses.replace(settings.meshes.trainer, fsdp=2, tensor=2),
    )
    split = dataclasses.replace(settings, meshes=mesh)
    assert trainer_bytes(split, TINY, meshes(split))["weights"] == one["weights"] // 4


def test_a_reference_counts_where_it_lies():
    settings = make_settings(algorithm={"kl_coefficient": 0.1}, model={"compute_dtype": "bfloat16"})
    mine = trainer_bytes(settings, TINY, meshes(settings), reference=TINY)
    assert mine["reference weights"] == 2 * TINY.num_parameters
    own = make_settings(
        algorithm={"kl_coefficient": 0.1, "reference_dtype": "float32"},
        meshes={"reference_devices": (2, 3)},
    )
    assert "reference weights" not in trainer_bytes(own, TINY, meshes(own), reference=TINY)
    expected = {"reference weights": 4 * (TINY.num_parameters // 2)}
    assert reference_bytes(own, TINY, meshes(own)) == expected


def test_generation_memory_counts_every_slot_at_full_length():
    settings = make_settings(
        generation={
            "slots": 6,
            "max_prompt_tokens": 30,
            "max_new_tokens": 20,
            "cache_dtype": "bfloat16",
        }
    )
    sizes = generation_bytes(settings, TINY, meshes(settings))
    # keys and values, layers, slots, KV heads, positions, head width, bytes
    assert sizes["KV cache"] == 2 * 2 * 6 * 2 * 50 * 8 * 2
    longer = make_settings(generation={"max_prompt_tokens": 300, "max_new_tokens": 300})
    capped = generation_bytes(longer, TINY, meshes(longer))["KV cache"]
    assert capped == 2 * 2 * 64 * 2 * TINY.max_positions * 8 * 2


def test_a_streamed_reward_model_counts_its_weights_and_all_its_rows():
    settings = make_settings(
        reward_model={"source": "x", "rows": 5, "cache_dtype": "float32"},
        generation={"max_prompt_tokens": 30, "max_new_tokens": 20},
        meshes={"scoring_devices": (2, 3)},
    )
    model = ScoringModel(directory=Path("x"), config=TINY, tokens_of=own_tokens)
    sizes = scoring_bytes(settings, model, meshes(settings), policy=TINY)
    assert sizes["reward model weights"] == 2 * ((TINY.num_parameters + TINY.width) // 2)
    # keys and values, layers, rows and the spare one, KV heads, positions, head width, bytes
    assert sizes["reward model KV cache"] == 2 * 2 * 6 * 2 * 50 * 8 * 4
    whole = dataclasses.replace(
        settings, reward_model=dataclasses.replace(settings.reward_model, streaming=False)
    )
    assert set(scoring_bytes(whole, model, meshes(whole), policy=TINY)) == {"reward model weights"}


def test_a_streamed_reference_keeps_what_it_has_read():
    settings = make_settings(
        algorithm={"kl_coefficient": 0.1, "reference_streaming": True},
        model={"compute_dtype": "bfloat16"},
        reward_model={"rows": 5},
        generation={"max_prompt_tokens": 30, "max_new_tokens": 20},
    )
    sizes = reference_bytes(settings, TINY, meshes(settings))
    assert sizes["reference KV cache"] == 2 * 2 * 6 * 2 * 50 * 8 * 2


def test_a_critic_model_counts_with_its_moments():
    settings = make_settings(
        algorithm={"baseline": "gae", "critic": "model"}, meshes={"critic_devices": (2, 3)}
    )
    sizes = critic_bytes(settings, TINY, meshes(settings))
    half = TINY.num_parameters // 2
    assert sizes == {
        "critic weights": 4 * half,
        "critic AdamW moments (float32)": 8 * half,
        "critic gradients (float32)": 4 * half,
    }

"""The engine's verbs: alignment with the trainer's forward pass, and rule 3 (randomness)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline_rl_jax.generation.engine import SlotRequest
from pipeline_rl_jax.generation.transformer_engine import TransformerEngine
from pipeline_rl_jax.models.token_logprobs import token_logprobs
from tests.fakes.tiny_engine import TINY, TinyGeneration, prompts, tiny_mesh, tiny_model


def trainer_logprobs(graphdef, params, completion, temperature):
    """What the trainer computes for the tokens of a completion."""
    ids = np.concatenate([completion.prompt.token_ids, completion.token_ids])[None]
    start = completion.prompt.token_ids.size
    model = nnx.merge(graphdef, params)
    positions = jnp.arange(ids.shape[1])[None]
    hidden = model(ids, positions=positions, segment_ids=jnp.ones_like(ids))
    logprobs, _ = token_logprobs(
        hidden, model.output_embedding, ids, positions >= start, temperature=temperature
    )
    return logprobs[0, start:]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_behaviour_logprobs_are_the_trainers_at_temperature_0_7(tokenizer, family):
    changes = {"qkv_bias": False, "qk_norm": True, "tied_embeddings": False}
    config = TINY if family == "qwen2" else dataclasses.replace(TINY, family=family, **changes)
    graphdef, params = tiny_model(config=config)
    generation = TinyGeneration(tokenizer, params=params, temperature=0.7, config=config)
    done = generation.complete(prompts(5), group_size=2)
    assert len(done) == 10
    for completion in done.values():
        expected = trainer_logprobs(graphdef, params, completion, 0.7)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    assert len({tuple(c.token_ids) for c in done.values()}) == 10


def test_same_tokens_through_4_8_and_16_slots_in_different_orders(tokenizer):
    asked = prompts(7)
    _, params = tiny_model()
    runs = []
    for slots, order in ((4, 1), (8, -1), (16, 1)):
        generation = TinyGeneration(tokenizer, params=params, slots=slots, prompts_per_prefill=3)
        runs.append(generation.complete(asked[::order], group_size=3))
    for key, completion in runs[0].items():
        for other in runs[1:]:
            np.testing.assert_array_equal(completion.token_ids, other[key].token_ids)


def test_tensor_and_data_parallel_generation_gives_the_same_tokens(tokenizer):
    _, params = tiny_model()
    alone = TinyGeneration(tokenizer, params=params).complete(prompts(4), group_size=2)
    mesh = tiny_mesh(data=2, tensor=2)
    split = TinyGeneration(tokenizer, params=params, mesh=mesh)
    for key, completion in split.complete(prompts(4), group_size=2).items():
        np.testing.assert_array_equal(completion.token_ids, alone[key].token_ids)
        np.testing.assert_allclose(completion.logprobs, alone[key].logprobs, atol=1e-4)
    query = split.weights.params["layers"][0]["query"]
    assert query.sharding.spec == jax.sharding.PartitionSpec("tensor", None)


def test_kv_heads_that_do_not_divide_are_replicated(tokenizer):
    config = dataclasses.replace(TINY, num_query_heads=6, num_kv_heads=3)
    _, params = tiny_model(config=config)
    alone = TinyGeneration(tokenizer, params=params, config=config).complete(prompts(3))
    mesh = tiny_mesh(data=1, tensor=2)
    split = TinyGeneration(tokenizer, params=params, config=config, mesh=mesh).complete(prompts(3))
    for key, completion in split.items():
        np.testing.assert_array_equal(completion.token_ids, alone[key].token_ids)


def test_bulk_insert_is_repeated_insert(tokenizer):
    engine = (generation := TinyGeneration(tokenizer)).engine
    params = generation.weights.params
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8) + 40
    lengths = np.array([8, 5], np.int32)
    prefix = engine.prefill(params=params, padded_tokens=tokens, true_lengths=lengths)
    requests = [
        SlotRequest(
            slot=slot,
            row=row,
            last_token=70,
            length=int(lengths[row]),
            prompt_id=row,
            sample_index=slot,
            num_generated=0,
            max_new_tokens=9,
            temperature=1.0,
        )
        for slot, row in ((3, 0), (1, 1), (0, 0))
    ]
    at_once = engine.bulk_insert(prefix, engine.init_decode_state(), requests)
    one_by_one = engine.init_decode_state()
    for request in requests:
        one_by_one = engine.insert(prefix, one_by_one, request)
    jax.tree.map(np.testing.assert_array_equal, at_once, one_by_one)
    _, first = engine.generate(params, at_once)
    assert first.counts.tolist() == [4, 4, 0, 4]


def test_a_chunk_ends_early_when_every_slot_is_done(tokenizer):
    generation = TinyGeneration(tokenizer, tokens_per_chunk=16, max_new_tokens=3)
    batcher = generation.batcher()
    generation.complete(prompts(2), batcher=batcher)
    assert batcher.counts.decode_steps == 3


def test_free_resource_and_resize_leave_other_slots_alone(tokenizer):
    generation = TinyGeneration(tokenizer, ignore_eos=True)
    undisturbed = generation.complete(prompts(1))[(100, 0)]
    engine, params = generation.engine, generation.weights.params
    batcher = generation.batcher()
    for prompt in prompts(2):
        batcher.admit(prompt, 1)
    batcher.advance(generation.weights)
    state = engine.resize(batcher._state, cache_tokens=40)
    state = engine.free_resource(state, 1)
    state, result = engine.generate(params, state)
    assert result.counts.tolist() == [4, 0, 0, 0]
    np.testing.assert_array_equal(result.token_ids[0], undisturbed.token_ids[4:8])


def test_slots_must_divide_over_the_data_axis(tokenizer):
    with pytest.raises(ValueError, match=r"generation.slots \(4\).*data axis \(3\)"):
        TransformerEngine(
            TINY,
            TinyGeneration(tokenizer).settings,
            mesh=tiny_mesh(data=3),
            stop_token_ids=[],
            seed=0,
        )


def test_bfloat16_cache_and_weights_stay_close(tokenizer):
    _, params = tiny_model(scale=1.0)
    exact = TinyGeneration(tokenizer, params=params, temperature=0.0).complete(prompts(4))
    half = TinyGeneration(
        tokenizer,
        params=params,
        temperature=0.0,
        compute_dtype="bfloat16",
        cache_dtype="bfloat16",
    ).complete(prompts(4))
    for key, completion in half.items():
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs[0], exact[key].logprobs[0], atol=0.1)

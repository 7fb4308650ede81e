"""Continuous batching: slots refilled, versions stamped, in-flight updates, stops and limits."""

import collections
import dataclasses
import functools

import numpy as np
import pytest

from pipeline_rl_jax.records import Prompt, StopReason
from tests.fakes.tiny_engine import (
    TINY,
    FixedWeights,
    TinyGeneration,
    prompts,
    tiny_mesh,
    tiny_model,
)
from tests.fakes.tiny_tokenizer import END_ID, EOS_ID


def test_slots_are_refilled_until_all_samples_are_done(tokenizer):
    generation = TinyGeneration(tokenizer)
    batcher = generation.batcher()
    assert batcher.num_open_samples == 4
    for prompt in prompts(5):
        batcher.admit(prompt, 3)
    assert (batcher.num_open_samples, batcher.num_live) == (0, 15)
    done = generation.drain(batcher)
    assert len(done) == 15
    assert (batcher.num_open_samples, batcher.num_live) == (4, 0)
    assert batcher.counts.decoded_tokens == sum(c.num_tokens for c in done.values())
    assert batcher.counts.slot_steps == 4 * batcher.counts.decode_steps


def test_one_prefill_serves_a_group(tokenizer):
    generation = TinyGeneration(tokenizer)
    batcher = generation.batcher()
    prompt = prompts(1)[0]
    generation.complete([prompt], group_size=4, batcher=batcher)
    assert batcher.counts.prefilled_tokens == prompt.token_ids.size - 1


def test_an_update_reaches_half_written_sequences_and_is_stamped(tokenizer):
    generation = TinyGeneration(tokenizer, ignore_eos=True, max_new_tokens=12)
    other = FixedWeights(3, generation.engine.load_params(tiny_model(seed=1)[1]))
    old = generation.complete(prompts(2))
    batcher = generation.batcher()
    for prompt in prompts(2):
        batcher.admit(prompt, 1)
    batcher.advance(generation.weights)
    mixed = generation.drain(batcher, other)
    for key, completion in mixed.items():
        assert completion.weight_versions.tolist() == [0] * 4 + [3] * 8
        assert completion.mixes_versions
        np.testing.assert_array_equal(completion.token_ids[:4], old[key].token_ids[:4])
        assert completion.token_ids[4:].tolist() != old[key].token_ids[4:].tolist()
    assert batcher.counts.inflight_updates == batcher.counts.version_changes == 1


def test_recompute_with_unchanged_weights_changes_nothing(tokenizer):
    generation = TinyGeneration(tokenizer, ignore_eos=True)
    kept = generation.complete(prompts(4), group_size=2)
    batcher = generation.batcher()
    for prompt in prompts(4):
        batcher.admit(prompt, 2)
    recomputed = []
    while batcher.num_live:
        recomputed += batcher.advance(generation.weights)
        batcher.recompute(generation.weights)
    for completion in recomputed:
        expected = kept[(completion.prompt.prompt_id, completion.sample_index)]
        np.testing.assert_array_equal(completion.token_ids, expected.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-4)


def test_recompute_makes_the_cache_that_of_the_new_weights(tokenizer):
    generation = TinyGeneration(tokenizer, ignore_eos=True, max_new_tokens=8, temperature=0.0)
    new = FixedWeights(1, generation.engine.load_params(tiny_model(seed=1)[1]))
    batcher = generation.batcher()
    batcher.admit(prompts(1, longest=8)[0], 1)
    batcher.advance(generation.weights)
    batcher.recompute(new)
    (mixed,) = generation.drain(batcher, new).values()
    # Under the new weights the first four tokens are as good as a longer prompt.
    prompt = mixed.prompt
    longer = Prompt(
        prompt_id=1,
        token_ids=np.concatenate([prompt.token_ids, mixed.token_ids[:4]]),
        text="",
        answer="",
    )
    fresh = generation.batcher()
    fresh.admit(longer, 1)
    (expected,) = generation.drain(fresh, new).values()
    np.testing.assert_array_equal(mixed.token_ids[4:], expected.token_ids[:4])


def test_stop_reasons(tokenizer):
    generation = TinyGeneration(tokenizer, max_new_tokens=24)
    done = generation.complete(prompts(40), group_size=2)
    reasons = collections.Counter(c.stop_reason for c in done.values())
    assert set(reasons) == {StopReason.EOS, StopReason.MAX_NEW_TOKENS}
    for completion in done.values():
        ends = [i for i in completion.token_ids.tolist() if i in (EOS_ID, END_ID)]
        if completion.stop_reason is StopReason.EOS:
            assert ends == [completion.token_ids[-1]]
        else:
            assert not ends
            assert completion.num_tokens == 24
            assert completion.stop_reason.truncated


def test_stop_strings_cut_what_follows_in_the_chunk(tokenizer):
    free = TinyGeneration(tokenizer, ignore_eos=True).complete(prompts(6))
    texts = {key: c.text for key, c in free.items()}
    stop = next(t[5:7] for t in texts.values() if t[5:7].isascii() and len(t[5:7]) == 2)
    generation = TinyGeneration(tokenizer, ignore_eos=True, stop_strings=(stop,))
    stopped = generation.complete(prompts(6))
    for key, completion in stopped.items():
        place = texts[key].find(stop)
        if place < 0:
            assert completion.text == texts[key]
            continue
        assert completion.text == texts[key][: place + 2]
        assert completion.stop_reason is StopReason.STOP_STRING
        sizes = {completion.token_ids.size, completion.logprobs.size}
        assert sizes == {completion.weight_versions.size}
    assert any(c.stop_reason is StopReason.STOP_STRING for c in stopped.values())


def test_the_models_context_limits_a_completion(tokenizer):
    config = dataclasses.replace(TINY, max_positions=20)
    generation = TinyGeneration(tokenizer, config=config, ignore_eos=True)
    prompt = next(p for p in prompts(20) if p.token_ids.size == 13)
    (completion,) = generation.complete([prompt]).values()
    assert completion.num_tokens == 7
    assert completion.stop_reason is StopReason.CONTEXT_LIMIT


@pytest.mark.parametrize("size", [0, 17])
def test_prompts_that_cannot_be_served_are_refused_before_any_device_work(tokenizer, size):
    batcher = TinyGeneration(tokenizer).batcher()
    bad = Prompt(prompt_id=5, token_ids=np.zeros(size, np.int32), text="", answer="")
    with pytest.raises(ValueError, match=r"prompt 5 has .*max_prompt_tokens"):
        batcher.admit(bad, 1)
    assert batcher.num_live == 0


def test_cancel_all_returns_every_sample_and_frees_every_slot(tokenizer):
    generation = TinyGeneration(tokenizer, ignore_eos=True)
    batcher = generation.batcher()
    for prompt in prompts(3):
        batcher.admit(prompt, 2)
    batcher.advance(generation.weights)
    cancelled = batcher.cancel_all()
    assert len(cancelled) == 6
    assert {c.stop_reason for c in cancelled} == {StopReason.CANCELLED}
    assert sorted(c.num_tokens for c in cancelled) == [0, 0, 4, 4, 4, 4]
    assert (batcher.num_live, batcher.num_open_samples) == (0, 4)
    again = generation.complete(prompts(3), group_size=2, batcher=batcher)
    fresh = generation.complete(prompts(3), group_size=2)
    for key, completion in again.items():
        np.testing.assert_array_equal(completion.token_ids, fresh[key].token_ids)


def test_the_cache_grows_and_shrinks_with_what_is_live(tokenizer):
    generation = TinyGeneration(
        tokenizer, ignore_eos=True, min_cache_tokens=8, max_new_tokens=40, tokens_per_chunk=2
    )
    batcher = generation.batcher()
    batcher.admit(prompts(1, longest=3)[0], 1)
    sizes = []
    while batcher.num_live:
        batcher.advance(generation.weights)
        sizes.append(batcher._state.cache.num_positions)
    assert sizes[0] == 8
    assert sizes == sorted(sizes)
    assert sizes[-1] == 56  # the context: 16 + 40
    generation.complete(prompts(1, longest=3), batcher=batcher)
    batcher.admit(prompts(1, longest=3)[0], 1)
    batcher.advance(generation.weights)
    assert batcher._state.cache.num_positions == 8


@pytest.mark.parametrize("data", [1, 2])
def test_a_batch_that_drains_goes_on_in_fewer_slots_with_the_same_tokens(tokenizer, data):
    context = dataclasses.replace(TINY, max_positions=20)  # long prompts end early
    made = functools.partial(
        TinyGeneration,
        tokenizer,
        mesh=tiny_mesh(data=data),
        config=context,
        slots=8,
        min_cache_tokens=20,
        ignore_eos=True,
    )
    expected = made(min_slots=8).complete(prompts(8))
    assert len({c.num_tokens for c in expected.values()}) > 3
    narrowing = made(min_slots=2)
    batcher = narrowing.batcher()
    for _ in range(2):  # the second time from few slots back to all of them
        done, sizes = {}, []
        for prompt in prompts(8):
            batcher.admit(prompt, 1)
        while batcher.num_live:
            done |= {
                (c.prompt.prompt_id, c.sample_index): c for c in batcher.advance(narrowing.weights)
            }
            sizes.append(batcher._state.tokens.shape[0])
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == 8
        assert sizes[-1] == 2
        assert done.keys() == expected.keys()
        for key, completion in done.items():
            np.testing.assert_array_equal(completion.token_ids, expected[key].token_ids)
            np.testing.assert_allclose(completion.logprobs, expected[key].logprobs, atol=1e-5)
    assert batcher.counts.slot_steps < 8 * batcher.counts.decode_steps


def test_samples_that_come_while_the_batch_is_narrow_widen_it(tokenizer):
    generation = TinyGeneration(tokenizer, slots=8, min_slots=2, ignore_eos=True)
    batcher = generation.batcher()
    batcher.admit(prompts(1)[0], 2)
    early = batcher.advance(generation.weights)
    assert batcher._state.tokens.shape[0] == 2
    assert batcher.num_open_samples == 6
    for prompt in prompts(4)[1:]:
        batcher.admit(prompt, 2)
    done = generation.drain(batcher) | {(c.prompt.prompt_id, c.sample_index): c for c in early}
    wide = TinyGeneration(tokenizer, slots=8, min_slots=8, ignore_eos=True)
    expected = wide.complete(prompts(4), group_size=2)
    assert done.keys() == expected.keys()
    for key, completion in done.items():
        np.testing.assert_array_equal(completion.token_ids, expected[key].token_ids)


def test_chunks_are_what_was_written_piece_by_piece(tokenizer):
    generation = TinyGeneration(tokenizer, max_new_tokens=10)
    batcher = generation.batcher(emit_chunks=True)
    for prompt in prompts(5):
        batcher.admit(prompt, 2)
    chunks, done = [], {}
    while batcher.num_live:
        for completion in batcher.advance(generation.weights):
            done[(completion.prompt.prompt_id, completion.sample_index)] = completion
        chunks.append(batcher.take_chunks())
    assert len(done) == 10
    assert batcher.take_chunks() == []
    assert all(len({(c.prompt.prompt_id, c.sample_index) for c in at}) == len(at) for at in chunks)
    for key, completion in done.items():
        own = [c for at in chunks for c in at if (c.prompt.prompt_id, c.sample_index) == key]
        np.testing.assert_array_equal(
            np.concatenate([c.token_ids for c in own]), completion.token_ids
        )
        np.testing.assert_array_equal(
            np.concatenate([c.logprobs for c in own]), completion.logprobs
        )
        starts = [c.start for c in own]
        assert starts == [sum(c.token_ids.size for c in own[:i]) for i in range(len(own))]
        assert [c.stop_reason for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].stop_reason is completion.stop_reason


def test_oldest_version_is_that_of_the_oldest_unfinished_token(tokenizer):
    generation = TinyGeneration(tokenizer, ignore_eos=True, slots=2)
    batcher = generation.batcher()
    assert batcher.oldest_version is None
    batcher.admit(prompts(1)[0], 1)
    batcher.advance(FixedWeights(4, generation.weights.params))
    batcher.admit(prompts(2)[1], 1)
    batcher.advance(FixedWeights(6, generation.weights.params))
    assert batcher.oldest_version == 4

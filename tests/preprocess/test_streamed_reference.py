"""Logprobs that came with the rollouts land on their tokens, wherever packing puts them."""

import dataclasses

import numpy as np

from pipeline_rl_jax.preprocess.batches import assemble
from pipeline_rl_jax.preprocess.streamed_reference import streamed_reference
from pipeline_rl_jax.records import Group
from tests.fakes.rollouts import make_group
from tests.fakes.settings import make_settings


def with_logprobs(group: Group) -> Group:
    """Token t of sample s of prompt p has the logprob −(100p + 10s + t)."""
    rollouts = []
    for rollout in group.rollouts:
        completion = rollout.completion
        first = 100 * completion.prompt.prompt_id + 10 * completion.sample_index
        logprobs = -(first + np.arange(completion.num_tokens, dtype=np.float32))
        rollouts.append(dataclasses.replace(rollout, reference_logprobs=logprobs))
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def settings():
    return make_settings(
        algorithm={"kl_coefficient": 0.1, "truncated": "mask"},
        trainer={"tokens_per_row": 12, "rows_per_micro_batch": 1},
    )


def groups():
    return [
        with_logprobs(make_group(1, [0.0, 1.0, 0.5], num_tokens=[2, 7, 4])),
        with_logprobs(make_group(2, [1.0, float("nan"), 0.0], num_tokens=[5, 3, 1])),
    ]


def test_every_token_has_its_own():
    def never(batch):
        raise AssertionError("the reference need not be asked")

    batch = assemble(groups(), settings(), reference_logprobs=never).batch
    lengths, firsts = [2, 7, 4, 5, 1], [100, 110, 120, 200, 220]  # the NaN is dropped
    mask, logprobs = np.asarray(batch.loss_mask), np.asarray(batch.reference_logprobs)
    for index, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        own = logprobs[mask & (np.asarray(batch.sequence_index) == index)]
        np.testing.assert_array_equal(own, -(first + np.arange(length)))
    assert not logprobs[~mask].any()


def test_one_rollout_without_makes_the_reference_score_all():
    first, second = groups()
    bare = dataclasses.replace(second.rollouts[0], reference_logprobs=None)
    second = dataclasses.replace(second, rollouts=(bare, *second.rollouts[1:]))
    result = assemble(
        [first, second],
        settings(),
        reference_logprobs=lambda batch: np.full(batch.token_ids.shape, 5.0, np.float32),
    )
    assert (np.asarray(result.batch.reference_logprobs) == 5.0).all()
    assert streamed_reference([]) is None

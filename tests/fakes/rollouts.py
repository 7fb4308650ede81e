"""Rollouts made by hand, and a model small enough to differentiate by hand: a table of bigrams."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pipeline_rl_jax.records import Completion, Group, PackedBatch, Prompt, Rollout, StopReason

VOCABULARY_SIZE = 7


def make_prompt(prompt_id: int = 0, *, num_tokens: int = 2, task: str = "") -> Prompt:
    token_ids = (np.arange(num_tokens) + prompt_id) % VOCABULARY_SIZE
    return Prompt(
        prompt_id=prompt_id, token_ids=token_ids.astype(np.int32), text="?", answer="1", task=task
    )


def make_completion(
    prompt: Prompt,
    token_ids: Sequence[int],
    *,
    sample_index: int = 0,
    logprobs: Sequence[float] | float = -1.0,
    versions: Sequence[int] | int = 0,
    stop_reason: StopReason = StopReason.EOS,
) -> Completion:
    shape = len(token_ids)
    return Completion(
        prompt=prompt,
        sample_index=sample_index,
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=np.broadcast_to(np.asarray(logprobs, np.float32), shape),
        weight_versions=np.broadcast_to(np.asarray(versions, np.int32), shape),
        stop_reason=stop_reason,
    )


def make_group(
    prompt_id: int, rewards: Sequence[float], *, num_tokens: Sequence[int] | int = 3, **completion
) -> Group:
    """A group with the given rewards; completions of the given lengths, tokens from their place."""
    prompt = make_prompt(prompt_id)
    lengths = np.broadcast_to(num_tokens, len(rewards))
    rollouts = [
        Rollout(
            completion=make_completion(
                prompt,
                [(prompt_id + 2 * index + 3 * t) % VOCABULARY_SIZE for t in range(length)],
                sample_index=index,
                **completion,
            ),
            reward=reward,
        )
        for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def bigram_logprobs(table: jax.Array, batch: PackedBatch) -> jax.Array:
    """log softmax(table[previous token])[token] at every token of a row but the first, [R, T]."""
    token_ids = jnp.asarray(batch.token_ids)
    logprobs = jax.nn.log_softmax(table)[token_ids[:, :-1], token_ids[:, 1:]]
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def rows_of(batch: PackedBatch, start: int, stop: int) -> PackedBatch:
    """Some rows of a batch as a micro-batch; its two scalars stay those of the whole batch."""
    return jax.tree.map(lambda x: x[start:stop] if np.ndim(x) == 2 else x, batch)

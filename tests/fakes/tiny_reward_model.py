"""A reward model that scores in milliseconds, and completions cut into chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from pipeline_rl_jax.meshes import replicated
from pipeline_rl_jax.models.reward_model import RewardModel
from pipeline_rl_jax.records import Chunk, Completion, Prompt, StopReason
from tests.fakes.tiny_training import TINY


def scoring_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))


@functools.cache
def reward_params() -> dict:
    model = RewardModel(TINY, rngs=nnx.Rngs(1))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    # Ten times the usual head, so that scores of different texts are far apart.
    params["score"] = 10 * params["score"]
    return jax.device_put(params, replicated(scoring_mesh()))


def make_completion(prompt_id: int, *, prompt_tokens: int, num_tokens: int) -> Completion:
    """Random token ids, the same for the same arguments."""
    generator = np.random.default_rng([prompt_id, prompt_tokens, num_tokens])
    token_ids = generator.integers(0, TINY.vocabulary_size, prompt_tokens + num_tokens, np.int32)
    prompt = Prompt(prompt_id=prompt_id, token_ids=token_ids[:prompt_tokens], text="", answer="")
    return Completion(
        prompt=prompt,
        sample_index=0,
        token_ids=token_ids[prompt_tokens:],
        logprobs=np.zeros(num_tokens, np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
        stop_reason=StopReason.EOS,
    )


def cut(completion: Completion, sizes: Sequence[int]) -> list[Chunk]:
    """The completion in chunks of these sizes."""
    assert sum(sizes) == completion.num_tokens
    ends = np.cumsum(sizes)
    return [
        Chunk(
            prompt=completion.prompt,
            sample_index=completion.sample_index,
            start=int(end - size),
            token_ids=completion.token_ids[end - size : end],
            logprobs=completion.logprobs[end - size : end],
            weight_version=0,
            stop_reason=completion.stop_reason if end == completion.num_tokens else None,
        )
        for size, end in zip(sizes, ends, strict=True)
    ]

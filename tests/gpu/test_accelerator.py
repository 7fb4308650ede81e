"""What only an accelerator can show: `pytest -m gpu tests`, as benchmarks/gpu_check.py runs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.models.token_logprobs import token_logprobs
from tests.fakes.tiny_engine import TinyGeneration, prompts, tiny_model
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.gpu


def test_the_engines_logprobs_are_the_trainers(tmp_path):
    """Rule 2 at temperature 0.7; matrix products on an accelerator are not full float32."""
    graph, params = tiny_model()
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    done = TinyGeneration(tokenizer, temperature=0.7).complete(prompts(4), group_size=2)
    model = nnx.merge(graph, params)
    with jax.default_matmul_precision("highest"):
        for completion in done.values():
            size = completion.prompt.token_ids.size
            ids = np.concatenate([completion.prompt.token_ids, completion.token_ids])[None]
            positions = np.arange(ids.shape[1])[None]
            hidden = model(ids, positions=positions, segment_ids=np.ones_like(ids))
            logprobs, _ = token_logprobs(
                hidden,
                model.output_embedding,
                jnp.asarray(ids),
                jnp.asarray(positions >= size),
                temperature=0.7,
                chunk_tokens=64,
            )
            np.testing.assert_allclose(
                np.asarray(logprobs)[0, size:], completion.logprobs, atol=2e-3
            )

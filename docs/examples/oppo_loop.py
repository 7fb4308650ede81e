"""OPPO's two overlaps around a training loop of your own, in one page.

    python docs/examples/oppo_loop.py

`OvercommitQueue` says which prompts to begin and which groups to train on, `IncrementalScorer`
reads completions while they are written. Generation, optimizer and loss are yours; here they are
an engine of this project and a few lines of REINFORCE on small random models, so that the program
runs in seconds. Nothing is learnt: it shows who is called when.
"""

from __future__ import annotations

import concurrent.futures
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from configs import base
from pipeline_rl_jax.data.character_tokenizer import num_tokens, write_character_tokenizer
from pipeline_rl_jax.data.tokenizer import Tokenizer, load_tokenizer
from pipeline_rl_jax.generation.batcher import ContinuousBatcher
from pipeline_rl_jax.generation.stopping import StopRules
from pipeline_rl_jax.generation.transformer_engine import TransformerEngine
from pipeline_rl_jax.models.chunk_readouts import score_so_far
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.loading import build_model, random_params
from pipeline_rl_jax.models.reward_model import RewardModel
from pipeline_rl_jax.models.token_logprobs import token_logprobs
from pipeline_rl_jax.records import Group, Prompt, Rollout
from pipeline_rl_jax.rewards.streamed_model import StreamedModel, StreamShape
from pipeline_rl_jax.rewards.streaming import IncrementalScorer
from pipeline_rl_jax.rollouts.overcommit import OvercommitQueue
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.settings_parsing import parse_settings

ALPHABET = "abcdefgh "
CONFIG = ModelConfig(
    family="llama",
    vocabulary_size=num_tokens(ALPHABET),
    width=32,
    mlp_width=64,
    num_layers=2,
    num_query_heads=2,
    num_kv_heads=2,
    head_width=16,
    max_positions=64,
    rope_theta=10_000.0,
    tied_embeddings=True,
)
NUM_STEPS, BATCH_GROUPS, GROUP_SIZE = 5, 3, 2
LEARNING_RATE = 0.1


def main() -> None:
    settings, tokenizer = make_settings(), make_tokenizer()
    engine, batcher = make_generation(settings, tokenizer)
    scorer = make_scorer(engine.mesh)
    update = make_update(settings)
    params = random_params(CONFIG, seed=0, dtype="float32")
    prompts = (make_prompt(number, tokenizer) for number in range(1000))

    queue = OvercommitQueue(
        batch_groups=BATCH_GROUPS, overcommit=2, max_deferrals=2, num_batches=NUM_STEPS
    )
    # The scorer has a thread, so that it reads chunk k - 1 while chunk k is decoded.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as reading:
        for step in range(NUM_STEPS):
            weights = SimpleNamespace(version=step, params=engine.load_params(params))
            for _ in range(queue.room):  # B + Δ prompts in flight
                prompt = next(prompts)
                queue.admit(prompt, size=GROUP_SIZE)
                batcher.admit(prompt, GROUP_SIZE)
            while queue.missing:
                completions = batcher.advance(weights)
                reading.submit(scorer.extend, batcher.take_chunks())
                keys = [(c.prompt.prompt_id, c.sample_index) for c in completions]
                scores = reading.submit(scorer.finish_all, keys).result() if keys else []
                for completion, score in zip(completions, scores, strict=True):
                    queue.add(Rollout(completion=completion, reward=score.value))
            params, reward = update(params, queue.take())  # the first B; the others go on
            print(
                f"step {step}: mean score {reward:+.3f}, {batcher.num_live} completions go on, "
                f"read ahead {scorer.counts.streamed_tokens} tokens, "
                f"after the end {scorer.counts.final_tokens}"
            )
    queue.abandon()
    print(f"deferred by 0, 1, 2 steps: {dict(queue.account.deferrals)}; left: {queue.drops.counts}")


def make_settings() -> Settings:
    config = base.get_config()
    config.model.source = "random"
    config.model.compute_dtype = "float32"
    config.generation.update(
        {
            "slots": 12,
            "min_slots": 12,
            "tokens_per_chunk": 4,
            "max_prompt_tokens": 8,
            "max_new_tokens": 40,
            "prefill_buckets": (8,),
            "min_cache_tokens": 16,
            "compute_dtype": "float32",
            "cache_dtype": "float32",
        }
    )
    return parse_settings(config)


def make_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        write_character_tokenizer(Path(directory), ALPHABET)
        return load_tokenizer(Path(directory))


def make_prompt(number: int, tokenizer: Tokenizer) -> Prompt:
    text = ALPHABET[number % 8] * 3
    ids = np.asarray(tokenizer.encode(text), np.int32)
    return Prompt(prompt_id=number, token_ids=ids, text=text, answer="")


def make_generation(
    settings: Settings, tokenizer: Tokenizer
) -> tuple[TransformerEngine, ContinuousBatcher]:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    rules = StopRules(tokenizer, stop_strings=(), ignore_eos=False)
    engine = TransformerEngine(
        CONFIG, settings.generation, mesh=mesh, stop_token_ids=rules.token_ids, seed=0
    )
    batcher = ContinuousBatcher(
        engine,
        settings.generation,
        tokenizer=tokenizer,
        stop_rules=rules,
        max_positions=CONFIG.max_positions,
        emit_chunks=True,
    )
    return engine, batcher


def make_scorer(generation_mesh: Mesh) -> IncrementalScorer:
    devices = generation_mesh.devices.reshape(1, 1, 1)  # better: devices of its own
    shape = StreamShape(
        rows=12,
        max_tokens=48,
        chunk_widths=(8, 16),
        min_cache_tokens=48,
        cache_dtype="float32",
        compute_dtype="float32",
    )
    model = nnx.state(RewardModel(CONFIG, rngs=nnx.Rngs(1)), nnx.Param)
    return IncrementalScorer(
        StreamedModel(
            CONFIG,
            nnx.to_pure_dict(model),
            readout=score_so_far,
            shape=shape,
            mesh=Mesh(devices, ("data", "fsdp", "tensor")),
        )
    )


def make_update(settings: Settings):
    """`(params, groups) → (params, mean score)`: your loss and your optimizer."""
    graph = build_model(CONFIG, settings.model)

    @jax.jit
    def step(params, token_ids, mask, advantages):
        def loss(params):
            model = nnx.merge(graph, params)
            positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
            hidden = model(token_ids, positions=positions, segment_ids=jnp.ones_like(token_ids))
            logprobs, _ = token_logprobs(
                hidden, model.output_embedding, token_ids, mask, chunk_tokens=token_ids.size
            )
            return -jnp.mean(advantages * jnp.sum(logprobs, axis=1))

        gradient = jax.grad(loss)(params)
        return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, params, gradient)

    def update(params, groups: list[Group]):
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = np.array([rollout.reward for rollout in rollouts])
        token_ids = np.zeros((len(rollouts), 48), np.int32)
        mask = np.zeros((len(rollouts), 48), bool)
        for row, rollout in enumerate(rollouts):
            completion = rollout.completion
            start, end = completion.prompt.token_ids.size, completion.num_tokens
            token_ids[row, :start] = completion.prompt.token_ids
            token_ids[row, start : start + end] = completion.token_ids
            mask[row, start : start + end] = True
        advantages = (rewards - rewards.mean()).astype(np.float32)
        return step(params, token_ids, mask, advantages), rewards.mean()

    return update


if __name__ == "__main__":
    main()

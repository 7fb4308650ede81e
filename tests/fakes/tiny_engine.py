"""A tiny random model behind a real engine, for tests of generation and of whole runs."""

import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

from configs import base
from pipeline_rl_jax.generation.batcher import ContinuousBatcher
from pipeline_rl_jax.generation.stopping import StopRules
from pipeline_rl_jax.generation.transformer_engine import TransformerEngine
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.transformer import Transformer
from pipeline_rl_jax.records import Prompt
from pipeline_rl_jax.settings import GenerationSettings

TINY = ModelConfig(
    family="qwen2",
    vocabulary_size=264,
    width=32,
    mlp_width=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_width=8,
    max_positions=256,
    rope_theta=10_000.0,
    qkv_bias=True,
    tied_embeddings=True,
)


@dataclasses.dataclass(frozen=True)
class FixedWeights:
    version: int
    params: object


def generation_settings(**changes) -> GenerationSettings:
    defaults = base.get_config().generation.to_dict()
    tiny = {
        "slots": 4,
        "tokens_per_chunk": 4,
        "max_prompt_tokens": 16,
        "max_new_tokens": 24,
        "prefill_buckets": (16,),
        "prompts_per_prefill": 2,
        "min_cache_tokens": 40,  # the whole context: one size, one compile
        "compute_dtype": "float32",
        "cache_dtype": "float32",
    }
    return GenerationSettings(**{**defaults, **tiny, **changes})


def tiny_model(seed: int = 0, scale: float = 3.0, config: ModelConfig = TINY):
    """A model whose logits spread enough for completions to differ: (graphdef, params)."""
    model = Transformer(config, rngs=nnx.Rngs(seed))
    model.embedding[...] = model.embedding[...] * scale * 10
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def tiny_mesh(data: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return jax.sharding.Mesh(devices, ("data", "tensor"))


@functools.cache
def _engine(config, settings, mesh, stop_token_ids, seed) -> TransformerEngine:
    """Engines hold no state, so tests with the same settings share one and its compiled calls."""
    return TransformerEngine(config, settings, mesh=mesh, stop_token_ids=stop_token_ids, seed=seed)


class TinyGeneration:
    """Engine, weights and batchers for one settings."""

    def __init__(self, tokenizer, *, params=None, mesh=None, seed=7, config=TINY, **changes):
        self.settings = generation_settings(**changes)
        self.tokenizer = tokenizer
        self.stop_rules = StopRules(
            tokenizer,
            stop_strings=self.settings.stop_strings,
            ignore_eos=self.settings.ignore_eos,
        )
        self.engine = _engine(
            config, self.settings, mesh or tiny_mesh(), self.stop_rules.token_ids, seed
        )
        self.config = config
        self.params = tiny_model()[1] if params is None else params
        self.weights = FixedWeights(0, self.engine.load_params(self.params))

    def batcher(self, *, emit_chunks=False, **changes) -> ContinuousBatcher:
        return ContinuousBatcher(
            self.engine,
            dataclasses.replace(self.settings, **changes),
            tokenizer=self.tokenizer,
            stop_rules=self.stop_rules,
            max_positions=self.config.max_positions,
            emit_chunks=emit_chunks,
        )

    def complete(self, prompts, *, group_size=1, batcher=None) -> dict:
        """(prompt id, sample index) → completion, all prompts admitted at once."""
        batcher = batcher or self.batcher()
        for prompt in prompts:
            batcher.admit(prompt, group_size)
        return self.drain(batcher)

    def drain(self, batcher, weights=None) -> dict:
        done = []
        while batcher.num_live:
            done += batcher.advance(weights or self.weights)
        return {(c.prompt.prompt_id, c.sample_index): c for c in done}


def prompts(count: int, *, seed: int = 0, longest: int = 16) -> list[Prompt]:
    """Random prompts of 2 to `longest` byte tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        ids = rng.integers(32, 127, rng.integers(2, longest + 1)).astype(np.int32)
        made.append(Prompt(prompt_id=100 + i, token_ids=ids, text=bytes(ids).decode(), answer=""))
    return made

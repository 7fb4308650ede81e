"""Decode throughput: our engine, `transformers.generate`, and the bare matrix products of a step.

    python benchmarks/decode.py --dtype=bfloat16

One run measures all three by turns on the same machine, model, batch and number of new tokens, and
prints medians and ratios. Needs torch and transformers (`pip install -e .[parity]`). Compare on a
quiet machine only: torch with two OpenMP threads spins, and one foreign busy core slows it a lot.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.generation.batcher import ContinuousBatcher
from pipeline_rl_jax.generation.decode_model import product_float32
from pipeline_rl_jax.generation.stopping import StopRules
from pipeline_rl_jax.generation.transformer_engine import TransformerEngine
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.records import Prompt
from pipeline_rl_jax.settings import GenerationSettings

PROMPT_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class _Weights:
    version: int
    params: object


def main() -> None:
    options = _options()
    directory = prepare_model(options.model)
    config = read_config(directory)
    prompts = np.random.default_rng(0).integers(
        100, config.vocabulary_size - 100, (options.sequences, PROMPT_TOKENS)
    )
    contenders: dict[str, Callable[[], float]] = {
        "ours": _ours(directory, config, prompts, options),
        "matrix products alone": _matrix_products(config, options),
    }
    if not options.skip_transformers:
        contenders["transformers.generate"] = _transformers(directory, prompts, options)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()  # compiles, fills caches
    for _ in range(options.repeats):
        for name, run in contenders.items():
            seconds[name].append(run())
    _report(seconds, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--cache_dtype", default="", help="of our KV cache; empty = --dtype")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--tokens_per_chunk", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip_transformers", action="store_true")
    return parser.parse_args()


def _ours(directory: Path, config: ModelConfig, prompts, options) -> Callable[[], float]:
    settings = GenerationSettings(
        **{
            **base.get_config().generation.to_dict(),
            "slots": options.sequences,
            "tokens_per_chunk": options.tokens_per_chunk,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_new_tokens": options.new_tokens,
            "prefill_buckets": (PROMPT_TOKENS,),
            "ignore_eos": True,
            "compute_dtype": options.dtype,
            "cache_dtype": options.cache_dtype or options.dtype,
        }
    )
    tokenizer = load_tokenizer(directory)
    rules = StopRules(tokenizer, stop_strings=(), ignore_eos=True)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    engine = TransformerEngine(config, settings, mesh=mesh, stop_token_ids=(), seed=0)
    trainer_mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor")
    )
    params = load_params(
        directory, config, shardings=param_shardings(config, trainer_mesh), dtype=options.dtype
    )
    weights = _Weights(0, engine.load_params(params))
    batcher = ContinuousBatcher(
        engine,
        settings,
        tokenizer=tokenizer,
        stop_rules=rules,
        max_positions=config.max_positions,
    )

    def run() -> float:
        start = time.perf_counter()
        for number, ids in enumerate(prompts):
            prompt = Prompt(prompt_id=number, token_ids=ids.astype(np.int32), text="", answer="")
            batcher.admit(prompt, 1)
        done = []
        while batcher.num_live:
            done += batcher.advance(weights)
        seconds = time.perf_counter() - start
        assert sum(c.num_tokens for c in done) == options.sequences * options.new_tokens
        return seconds

    return run


def _transformers(directory: Path, prompts, options) -> Callable[[], float]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=getattr(torch, options.dtype)
    ).eval()
    ids = torch.from_numpy(prompts)

    def run() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=options.new_tokens,
                max_new_tokens=options.new_tokens,
                pad_token_id=0,
            )
        assert out.shape[1] == PROMPT_TOKENS + options.new_tokens
        return time.perf_counter() - start

    return run


def _matrix_products(config: ModelConfig, options) -> Callable[[], float]:
    """The weight products of as many decode steps, nothing else: what bounds a decode loop.

    Laid out and stored as the engine does it, the fastest way found on CPU.
    """
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else options.dtype)
    query = config.num_query_heads * config.head_width
    shapes = [
        (query + 2 * config.num_kv_heads * config.head_width, config.width),
        (config.width, query),
        (2 * config.mlp_width, config.width),
        (config.width, config.mlp_width),
    ]
    layers = [[jnp.ones(shape, dtype) for shape in shapes] for _ in range(config.num_layers)]
    table = jnp.ones((config.vocabulary_size, config.width), dtype)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return product_float32(x[:, : weight.shape[1]], weight)

    @jax.jit
    def steps(layers, table, x):
        def step(_, x):
            for weights in layers:
                for weight in weights:
                    y = product(x, weight).astype(dtype) * 1e-3
                    x = jnp.tile(y, (1, 6))[:, : 2 * config.mlp_width]
            return x + jnp.max(product(x, table), axis=1, keepdims=True).astype(dtype)

        return jax.lax.fori_loop(0, options.tokens_per_chunk, step, x)

    x = jnp.ones((options.sequences, 2 * config.mlp_width), dtype)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(options.new_tokens // options.tokens_per_chunk):
            steps(layers, table, x).block_until_ready()
        return time.perf_counter() - start

    return run


def _report(seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    tokens = options.sequences * options.new_tokens
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{options.model}, {options.dtype}, {options.sequences} sequences, "
        f"{options.new_tokens} new tokens, median of {options.repeats}"
    )
    for name, value in median.items():
        spread = max(seconds[name]) / min(seconds[name])
        print(
            f"  {name:<24} {tokens / value:7.1f} tokens/s  "
            f"{value / options.new_tokens * 1e3:6.1f} ms/step  (slowest/fastest {spread:.2f})"
        )
    for name, value in median.items():
        if name != "ours":
            print(f"  ours / {name}: {value / median['ours']:.2f}x")


if __name__ == "__main__":
    main()

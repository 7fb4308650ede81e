"""Train-step throughput: our step, a plain torch loop, and the bare matrix products of a step.

    python benchmarks/train_step.py --dtype=float32

One run measures all three by turns on the same machine, weights and packed tokens, and prints
medians and ratios. The torch loop is hand-written and fair: the same loss, packed rows under
a mask, logits of trained tokens only, fused AdamW; both go through the same micro-batches.
Needs torch and transformers (`pip install -e .[parity]`), or runs without. Compare on a quiet
machine only.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from pipeline_rl_jax.meshes import build_meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.trainer.optimizer import build_optimizer
from pipeline_rl_jax.trainer.state import create_state
from pipeline_rl_jax.trainer.trainer import Trainer

SEGMENTS_PER_ROW = 8
Run = Callable[[], float]  # returns the loss


def main() -> None:
    options = _options()
    directory = prepare_model(options.model)
    config = read_config(directory)
    settings = _settings(options)
    batch = _batch(config, options)
    contenders: dict[str, Run] = {"ours": _ours(directory, config, settings, batch)}
    if not options.skip_products:
        contenders["matrix products alone"] = _matrix_products(config, batch, options)
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    if has_torch and not options.skip_torch:
        contenders["torch loop"] = _torch_loop(directory, settings, batch)
    losses = {name: run() for name, run in contenders.items()}  # compiles, fills caches
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    _report(seconds, losses, batch=batch, options=options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens_per_row", type=int, default=512)
    parser.add_argument("--rows_per_micro_batch", type=int, default=4)
    parser.add_argument("--remat", default="none", choices=["none", "dots", "full"])
    parser.add_argument("--logprob_chunk_tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip_torch", action="store_true")
    parser.add_argument("--skip_products", action="store_true")
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> Settings:
    config = base.get_config()
    config.update(
        {
            "model": {
                "source": options.model,
                "compute_dtype": options.dtype,
                "remat": options.remat,
                "logprob_chunk_tokens": options.logprob_chunk_tokens,
            },
            "generation": {
                "max_prompt_tokens": 16,
                "prefill_buckets": (16,),
                "max_new_tokens": options.tokens_per_row - 16,
            },
            "trainer": {
                "tokens_per_row": options.tokens_per_row,
                "rows_per_micro_batch": options.rows_per_micro_batch,
            },
        }
    )
    return parse_settings(config)


def _batch(config: ModelConfig, options: argparse.Namespace) -> PackedBatch:
    """Full rows of equal segments, a quarter of each a prompt."""
    shape = (options.rows, options.tokens_per_row)
    length = options.tokens_per_row // SEGMENTS_PER_ROW
    generator = np.random.default_rng(0)
    positions = np.broadcast_to(np.arange(shape[1]) % length, shape).astype(np.int32)
    segments = np.broadcast_to(np.arange(shape[1]) // length + 1, shape).astype(np.int32)
    mask = positions >= max(1, length // 4)
    row = np.arange(options.rows)[:, None] * SEGMENTS_PER_ROW
    zeros = np.zeros(shape, np.float32)
    return PackedBatch(
        token_ids=generator.integers(0, config.vocabulary_size, shape, np.int32),
        segment_ids=segments,
        positions=positions,
        loss_mask=mask,
        sequence_index=(segments - 1 + row).astype(np.int32),
        behaviour_logprobs=np.where(mask, -np.log(config.vocabulary_size), 0).astype(np.float32),
        advantages=np.where(mask, generator.normal(size=shape), 0).astype(np.float32),
        returns=zeros,
        reference_logprobs=zeros,
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        num_sequences=np.asarray(options.rows * SEGMENTS_PER_ROW, np.int32),
        num_rows=np.asarray(options.rows, np.int32),
    )


def _ours(directory: Path, config: ModelConfig, settings: Settings, batch: PackedBatch) -> Run:
    mesh = build_meshes(settings.meshes).trainer
    optimizer = build_optimizer(settings.trainer, num_steps=settings.schedule.num_steps)
    shardings = param_shardings(config, mesh)
    params = load_params(directory, config, shardings=shardings, dtype="float32")
    state = create_state(params, optimizer, config=config, mesh=mesh)
    trainer = Trainer(config, settings, optimizer=optimizer, mesh=mesh, state=state)
    return lambda: trainer.train(batch).fetch()["trainer/loss"]


def _torch_loop(directory: Path, settings: Settings, batch: PackedBatch) -> Run:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    trainer, rows = settings.trainer, settings.trainer.rows_per_micro_batch
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=trainer.learning_rate,
        betas=(trainer.beta1, trainer.beta2),
        weight_decay=trainer.weight_decay,
        fused=True,
    )
    names = ("token_ids", "segment_ids", "positions", "loss_mask", "behaviour_logprobs")
    arrays = {n: torch.from_numpy(np.array(getattr(batch, n))) for n in (*names, "advantages")}
    low_precision = settings.model.compute_dtype == "bfloat16"

    def micro_loss(part: dict) -> torch.Tensor:
        ids, segments, mask = part["token_ids"].long(), part["segment_ids"], part["loss_mask"]
        same = segments[:, :, None] == segments[:, None, :]
        visible = (same & torch.ones_like(same).tril())[:, None]
        with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
            hidden = model.model(
                input_ids=ids, attention_mask=visible, position_ids=part["positions"].long()
            ).last_hidden_state
            scores = model.lm_head(hidden[:, :-1][mask[:, 1:]]).float()
        logprobs = torch.log_softmax(scores, -1).gather(-1, ids[mask][:, None])[:, 0]
        ratio = (logprobs.detach() - part["behaviour_logprobs"][mask]).exp()
        weight = ratio.clamp(max=settings.algorithm.importance_clamp) * part["advantages"][mask]
        return -(weight * logprobs).sum() / float(batch.num_sequences)

    def run() -> float:
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, len(batch.token_ids), rows):
            loss = micro_loss({n: array[start : start + rows] for n, array in arrays.items()})
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.max_gradient_norm)
        optimizer.step()
        return total

    return run


def _matrix_products(config: ModelConfig, batch: PackedBatch, options: argparse.Namespace) -> Run:
    """Every product of activations and weights, forward and for both gradients: no attention, no
    recomputation, no optimizer. What a step cannot be faster than."""
    dtype = jnp.dtype(options.dtype)
    rows = options.rows_per_micro_batch
    tokens = rows * options.tokens_per_row
    trained = int(np.count_nonzero(batch.loss_mask[:rows]))
    query = config.num_query_heads * config.head_width
    kv = config.num_kv_heads * config.head_width
    shapes = [
        *[(tokens, config.width, width) for width in (query, kv, kv)],
        (tokens, query, config.width),
        *[(tokens, config.width, config.mlp_width)] * 2,
        (tokens, config.mlp_width, config.width),
    ] * config.num_layers
    shapes.append((trained, config.width, config.vocabulary_size))

    @jax.jit
    def products(x: jax.Array, weight: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return x @ weight, y @ weight.T, x.T @ y

    operands = {
        (count, fan_in, fan_out): (
            jnp.ones((count, fan_in), dtype),
            jnp.ones((fan_in, fan_out), dtype),
            jnp.ones((count, fan_out), dtype),
        )
        for count, fan_in, fan_out in set(shapes)
    }

    def run() -> float:
        for _ in range(options.rows // rows):
            for shape in shapes:
                jax.block_until_ready(products(*operands[shape]))
        return float("nan")

    return run


def _report(
    seconds: dict[str, list[float]],
    losses: dict[str, float],
    *,
    batch: PackedBatch,
    options: argparse.Namespace,
) -> None:
    tokens = int(np.count_nonzero(batch.segment_ids))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{options.model}, {options.dtype}, {options.rows} rows of {options.tokens_per_row} tokens "
        f"in micro-batches of {options.rows_per_micro_batch}, remat {options.remat}, "
        f"median of {options.repeats}"
    )
    for name, value in median.items():
        spread = max(seconds[name]) / min(seconds[name])
        print(
            f"  {name:<24} {tokens / value:8.1f} tokens/s  {value:7.2f} s/step  "
            f"(slowest/fastest {spread:.2f}; first loss {losses[name]:.6f})"
        )
    for name, value in median.items():
        if name != "ours":
            print(f"  ours / {name}: {value / median['ours']:.2f}x")


if __name__ == "__main__":
    main()

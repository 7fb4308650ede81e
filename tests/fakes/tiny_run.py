"""A whole run small enough for a test: a tiny random model on disk and a config for it."""

import json
from pathlib import Path

from flax import nnx
from ml_collections import ConfigDict

from configs import quickstart
from pipeline_rl_jax.models.hf_config import raw_config
from pipeline_rl_jax.models.hf_export import WeightFormat
from pipeline_rl_jax.models.hf_reward import save_reward_params
from pipeline_rl_jax.models.reward_model import RewardModel
from tests.fakes.tiny_engine import TINY
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer


def write_tiny_model(directory: Path) -> Path:
    """A Hugging Face directory without weights: for `model.init = "random"`."""
    write_tiny_tokenizer(directory)
    config = raw_config(TINY, dtype="float32")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_tiny_reward_model(directory: Path, tokenizer_of: Path, *, seed: int = 1) -> Path:
    """A reward model with random weights, and a head that sets texts far apart."""
    params = nnx.to_pure_dict(nnx.state(RewardModel(TINY, rngs=nnx.Rngs(seed)), nnx.Param))
    params["score"] = 10 * params["score"]
    save_reward_params(
        params,
        TINY,
        directory=directory,
        source=tokenizer_of,
        weight_format=WeightFormat(dtype="float32"),
    )
    return directory


def tiny_config(model: Path, **changes) -> ConfigDict:
    """The quickstart on the tiny model; `changes` are dotted paths with "__" for the dots."""
    config = quickstart.get_config()
    config.update_from_flattened_dict(
        {
            "model.source": str(model),
            "model.init": "random",
            "meshes.virtual_devices": 0,
            "generation.slots": 8,
            "generation.tokens_per_chunk": 4,
            "generation.max_prompt_tokens": 40,
            "generation.max_new_tokens": 8,
            "generation.prefill_buckets": (40,),
            "generation.min_cache_tokens": 48,
            "algorithm.group_size": 4,
            "trainer.batch_rollouts": 16,
            "trainer.tokens_per_row": 128,
            "schedule.num_steps": 3,
            "schedule.deadline_seconds": 300.0,
            "evaluation.num_prompts": 4,
            "telemetry.progress": "off",
            "telemetry.tensorboard": False,
        }
    )
    config.update_from_flattened_dict(
        {path.replace("__", "."): value for path, value in changes.items()}
    )
    return config


def read_metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]

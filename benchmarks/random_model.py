"""A Hugging Face directory with random weights of a well-known shape: nothing to download.

    python benchmarks/random_model.py --shape=qwen2.5-1.5b --output=/tmp/model

For throughput only. The tokenizer is one of characters; the vocabulary beyond it is unused.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline_rl_jax.data.character_tokenizer import write_character_tokenizer
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_export import save_params
from pipeline_rl_jax.models.loading import random_params

_QWEN = {"family": "qwen2", "qkv_bias": True, "rope_theta": 1e6, "norm_epsilon": 1e-6}
SHAPES = {
    "tiny": ModelConfig(
        **_QWEN,
        vocabulary_size=512,
        width=64,
        mlp_width=128,
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_width=16,
        max_positions=4096,
        tied_embeddings=True,
    ),
    "qwen2.5-1.5b": ModelConfig(
        **_QWEN,
        vocabulary_size=151_936,
        width=1536,
        mlp_width=8960,
        num_layers=28,
        num_query_heads=12,
        num_kv_heads=2,
        head_width=128,
        max_positions=32_768,
        tied_embeddings=True,
    ),
    "qwen2.5-7b": ModelConfig(
        **_QWEN,
        vocabulary_size=152_064,
        width=3584,
        mlp_width=18_944,
        num_layers=28,
        num_query_heads=28,
        num_kv_heads=4,
        head_width=128,
        max_positions=32_768,
        tied_embeddings=False,
    ),
}


def write_random_model(shape: str, directory: Path) -> None:
    """Weights in bfloat16. ValueError when `directory` holds something already."""
    config = SHAPES[shape]
    params = random_params(config, seed=0, dtype="bfloat16")
    save_params(params, config, directory=directory)
    write_character_tokenizer(directory, string.printable)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=sorted(SHAPES))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    write_random_model(options.shape, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()

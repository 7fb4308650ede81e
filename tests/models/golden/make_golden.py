"""Writes the tiny random models of this directory and the logits transformers gives them.

    python tests/models/golden/make_golden.py        (needs torch and transformers)

One model for each family and for each thing that is easily got wrong: q/k/v biases and split
files (qwen2), head norms and a head width of its own (qwen3), rope scaling far beyond the
original context and bfloat16 files (llama3_rope), 9 query heads over 3 KV heads and tied embeddings
(smollm).
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

DIRECTORY = Path(__file__).parent
VOCABULARY_SIZE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    config: transformers.PreTrainedConfig
    num_tokens: int
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"


def cases() -> dict[str, Case]:
    common = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 48}
    llama3_rope = {  # of four frequencies one is kept, one interpolated, two are stretched
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "qwen2": Case(
            config=transformers.Qwen2Config(**common, **heads, num_hidden_layers=2),
            num_tokens=24,
            max_shard_size="40KB",
        ),
        "qwen3": Case(
            config=transformers.Qwen3Config(
                **common, **heads, num_hidden_layers=3, head_dim=16, tie_word_embeddings=True
            ),
            num_tokens=24,
        ),
        "llama3_rope": Case(
            config=transformers.LlamaConfig(
                **common,
                **heads,
                num_hidden_layers=2,
                rope_parameters=llama3_rope,
                max_position_embeddings=128,
            ),
            num_tokens=120,
            dtype=torch.bfloat16,
        ),
        "smollm": Case(
            config=transformers.LlamaConfig(
                vocab_size=VOCABULARY_SIZE,
                hidden_size=36,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=9,
                num_key_value_heads=3,
                rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
                tie_word_embeddings=True,
            ),
            num_tokens=24,
        ),
    }


def write(name: str, case: Case) -> None:
    torch.manual_seed(0)
    directory = DIRECTORY / name
    shutil.rmtree(directory, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_config(case.config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
            else:  # wide enough that attention is far from uniform
                parameter.copy_(0.25 * torch.randn_like(parameter))
    model.to(case.dtype).save_pretrained(directory, max_shard_size=case.max_shard_size)
    (directory / "generation_config.json").unlink(missing_ok=True)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    token_ids = torch.randint(0, VOCABULARY_SIZE, (2, case.num_tokens))
    with torch.no_grad():
        logits = reloaded(token_ids).logits
    np.savez_compressed(
        directory / "logits.npz", token_ids=token_ids.numpy(), logits=logits.numpy()
    )
    print(f"{name}: logits {tuple(logits.shape)}, standard deviation {logits.std():.2f}")


if __name__ == "__main__":
    for name, case in cases().items():
        write(name, case)

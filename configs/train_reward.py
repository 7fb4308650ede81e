"""A reward model from preference pairs, by launch/train_reward.py.

    python launch/train_reward.py --config=configs/train_reward.py --workdir=runs/reward \
        --config.model.source=smollm2-135m --config.data.files=pairs.jsonl
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 42  # order of the pairs, and a new score head
    config.model = ConfigDict(
        {
            "source": "",  # Hugging Face directory or hub id, a language model or a reward model; or smollm2-135m
            "compute_dtype": "bfloat16",  # of activations; weights are trained, and scores compared, in float32
            "remat": "full",  # none | dots | full: what the backward pass recomputes of each layer
            "attention_block_tokens": 1024,  # query block of the attention; bounds memory
            "save_dtype": "bfloat16",  # of the weights written
        }
    )
    config.data = ConfigDict(
        {
            "files": "",  # .jsonl, .json or .parquet, globs, separated by commas
            "eval_files": "",  # held-out pairs; empty = the last eval_pairs of files
            "eval_pairs": 200,  # held-out pairs; with eval_files the first so many of them, 0 = all
            "prompt_format": "Question: {prompt}\n\nAnswer: ",  # what stands before an answer; must be the actor's
            "max_tokens": 1024,  # of prompt, answer and the end of sequence
            "too_long": "drop",  # drop (and count) | fail: nothing is ever cut
        }
    )
    config.trainer = ConfigDict(
        {
            "num_steps": 500,
            "batch_pairs": 16,  # per optimizer step, all in one forward pass
            "learning_rate": 1e-5,
            "warmup_steps": 20,
            "weight_decay": 0.0,
            "max_gradient_norm": 1.0,
        }
    )
    return config

"""The paper's run: Qwen2.5-7B on 17K OpenReasonerZero problems, B = 1024, 1000 optimizer steps.

    python launch/train.py --config=configs/openreasoner_7b.py --workdir=runs/orz7b \
        --config.data.path=orz_math_57k_collected.json

Written for one node with 8 H100s: 4 train, 4 generate (the paper: 80 train, 48 generate). Numbers
come from the paper [P] or its public code [repo], see `base.py`; the split of 8 devices, rows per
micro-batch and slots are ours. Not yet run at this size.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.source = "Qwen/Qwen2.5-7B"
    config.model.attention_block_tokens = 512
    config.meshes.trainer_devices = (0, 1, 2, 3)
    config.meshes.generation_devices = (4, 5, 6, 7)
    config.meshes.trainer.fsdp = 4
    config.data.source = "files"
    config.data.format = "orz"
    config.data.path = "orz_math_57k_collected.json"
    config.data.template = "plain"
    config.data.prompt_format = (
        "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    )
    config.data.too_long = "drop"
    config.generation.slots = 256
    config.generation.tokens_per_chunk = 64
    config.generation.prefill_buckets = (128, 256, 512, 1024)
    config.generation.min_cache_tokens = 2048
    config.rewards.num_workers = 8
    config.trainer.rows_per_micro_batch = 4
    config.schedule.max_lag = 32
    config.evaluation.every_steps = 50
    return config

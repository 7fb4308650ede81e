"""SmolLM2-135M learns to add on the CPU, weights flowing into the decode loop in flight.

    python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart

The host is split into two devices, one trains, one generates.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.source = "smollm2-135m"
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.model.logprob_chunk_tokens = 256
    config.meshes.virtual_devices = 2
    config.meshes.trainer_devices = (0,)
    config.meshes.generation_devices = (1,)
    config.data.arithmetic.max_operand = 12
    config.generation.slots = 32
    config.generation.min_slots = 32
    config.generation.tokens_per_chunk = 2
    config.generation.max_prompt_tokens = 24
    config.generation.max_new_tokens = 8
    config.generation.prefill_buckets = (24,)
    config.generation.prompts_per_prefill = 4
    config.generation.min_cache_tokens = 32
    config.generation.stop_strings = ("\n",)
    config.generation.compute_dtype = "float32"
    config.generation.cache_dtype = "float32"
    config.rewards.correctness = "exact_number"
    config.algorithm.group_size = 8
    config.trainer.batch_rollouts = 128
    config.trainer.tokens_per_row = 256
    config.trainer.rows_per_micro_batch = 2
    config.trainer.learning_rate = 1e-5
    config.trainer.max_gradient_norm = 1.0
    config.schedule.num_steps = 10
    config.schedule.max_lag = 2
    config.checkpointing.every_steps = 0
    return config

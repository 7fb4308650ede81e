"""Conventional RL, one-step-off and PipelineRL on one long-tail task, side by side on two cores.

    python launch/compare.py --config=configs/compare_schedules.py --workdir=runs/compare

A small model works sums out by counting (`What is 3 + 12?` takes three lines): most answers are
short, one in a hundred is ten times as long as the median, so a batch that must end before the next
begins drains for long. The model was taught with slips, so most of its answers hold one; rewards
rise as it unlearns them. Everything but the schedule is the same in all rows.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "base": _base(),
            # Name of a row: the settings in which it differs from `base`.
            "rows": {
                "conventional_g1": _conventional(1),
                "conventional_g4": _conventional(4),
                "conventional_g8": _conventional(8),
                "one_step_off": {"schedule": {"name": "one_step_off"}},
                "pipeline_keep": {"schedule": {"name": "pipeline"}},
                "pipeline_recompute": {
                    "schedule": {"name": "pipeline"},
                    "generation": {"kv_policy": "recompute"},
                },
            },
            "seeds": (42,),  # every row runs once with each
            "budget": {
                "samples": 5120,  # rollouts every row trains on, whole rounds of every row
                "seconds": 0.0,  # training time after which a row is stopped; 0 = never
            },
            # Steps at the beginning that compile: left out of steady_samples_per_second and of
            # step_seconds_median. One round of the row with the most steps a round.
            "warmup_steps": 8,
        }
    )


def _conventional(steps_per_round: int) -> dict:
    return {"schedule": {"name": "conventional", "optimizer_steps_per_round": steps_per_round}}


def _base() -> ConfigDict:
    config = base.get_config()
    config.model.source = "worked-sums"
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.meshes.virtual_devices = 2
    config.meshes.trainer_devices = (0,)
    config.meshes.generation_devices = (1,)
    config.data.arithmetic.operations = "+"
    config.data.arithmetic.min_operand = 2
    config.data.arithmetic.max_operand = 48
    config.data.arithmetic.first_operand_tail = 1.5
    config.data.prompt_format = "{problem}\n"
    config.generation.slots = 64
    config.generation.tokens_per_chunk = 8
    config.generation.max_prompt_tokens = 24
    config.generation.max_new_tokens = 288
    config.generation.prefill_buckets = (24,)
    config.generation.min_cache_tokens = 312
    config.generation.compute_dtype = "float32"
    config.generation.cache_dtype = "float32"
    config.rewards.correctness = "exact_number"
    config.algorithm.group_size = 8
    config.trainer.batch_rollouts = 64
    config.trainer.tokens_per_row = 312
    config.trainer.rows_per_micro_batch = 4
    config.trainer.learning_rate = (
        1.5e-4  # at 3e-4 a lag of 3 costs reward per sample, at 6e-4 it collapses
    )
    config.trainer.max_gradient_norm = 1.0
    config.schedule.max_lag = 4
    config.checkpointing.every_steps = 0
    config.checkpointing.at_end = False
    config.evaluation.at_start = False
    config.evaluation.at_end = False
    config.telemetry.tensorboard = False
    return config

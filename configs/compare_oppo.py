"""PPO as a sequence, with each of OPPO's overlaps, and with both, side by side on two cores.

    python launch/compare.py --config=configs/compare_oppo.py --workdir=runs/compare_oppo

Four models: the policy with a value head, the reference and a reward model that share a third
device, all of the size of `configs/compare_schedules.py`, whose long-tail task this is. The reward
is 1 for a right sum and a tenth of the reward model's score, which tells a finished answer from one
that stops before its end. `intra` streams completions to reward model and reference while they are
written, `inter` overcommits prompts, `both` does both. Everything else is the same in all rows.
"""

from ml_collections import ConfigDict

from configs import compare_schedules

_STREAMING = {"reward_model": {"streaming": True}, "algorithm": {"reference_streaming": True}}
_OVERCOMMIT = {  # Δ moves between a quarter of a batch and all of it
    "generation": {"slots": 64},
    "schedule": {
        "overcommit": {
            "variant": "additive",
            "start_groups": 16,
            "min_groups": 8,
            "max_groups": 32,
            "change_groups": 4,
        }
    },
}


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "base": _base(),
            "rows": {
                "sequential": {},
                "intra": _STREAMING,
                "inter": _OVERCOMMIT,
                "both": {**_OVERCOMMIT, **_STREAMING},
            },
            "seeds": (42,),
            "budget": {"samples": 1600, "seconds": 0.0},  # 50 steps
            "warmup_steps": 8,
        }
    )


def _base() -> ConfigDict:
    config = compare_schedules.get_config().base
    config.meshes.virtual_devices = 3
    config.meshes.scoring_devices = (2,)
    config.meshes.reference_devices = (2,)
    config.generation.slots = 32
    config.reward_model.source = "worked-sums-judge"
    config.reward_model.weight = 0.1
    config.reward_model.streaming = False
    config.reward_model.rows = 64
    config.reward_model.chunk_widths = (8, 64)
    config.reward_model.min_cache_tokens = 312
    config.reward_model.param_dtype = "float32"
    config.reward_model.compute_dtype = "float32"
    config.reward_model.cache_dtype = "float32"
    config.algorithm.loss = "ppo"
    config.algorithm.baseline = "gae"
    config.algorithm.group_size = 1
    config.algorithm.batch_normalise = True
    config.algorithm.aggregation = "token_mean"
    config.algorithm.value_coefficient = 0.1
    config.algorithm.value_clip = 0.2
    config.algorithm.kl_coefficient = 0.01
    config.algorithm.kl_in = "reward"
    config.algorithm.kl_estimator = "k1"
    config.trainer.batch_rollouts = 32
    config.schedule.name = "oppo"
    config.schedule.overcommit.variant = "fixed"
    config.schedule.overcommit.start_groups = 0
    return config

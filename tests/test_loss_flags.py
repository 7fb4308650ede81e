"""Every row of flags in docs/losses.md is accepted, and says what the algorithm's paper says."""

import ast
import re
import typing
from pathlib import Path

import pytest

from configs.base import get_config
from pipeline_rl_jax.settings import AlgorithmSettings, Settings
from pipeline_rl_jax.settings_parsing import parse_settings

PAGE = Path(__file__).parent.parent / "docs" / "losses.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = dict(
    re.findall(r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \| `(--config[^|]+)` \|$", TEXT, re.MULTILINE)
)

PPO = {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "baseline": "group_mean"}
EXPECTED = {
    "PipelineRL, group mean": {
        "loss": "is_reinforce",
        "importance_clamp": 5.0,
        "aggregation": "sequence_sum",
        "normalise_std": False,
        "kl_coefficient": 0.0,
    },
    "PipelineRL, learned value": {"baseline": "value", "group_size": 1, "value_coefficient": 0.1},
    "RLOO": {"baseline": "leave_one_out", "normalise_std": False},
    "GRPO": PPO
    | {
        "normalise_std": True,
        "aggregation": "sequence_mean",
        "kl_coefficient": 0.04,
        "kl_estimator": "k3",
        "kl_in": "loss",
    },
    "Dr. GRPO": PPO
    | {"normalise_std": False, "aggregation": "constant", "aggregation_constant": 8192.0},
    "DAPO": PPO
    | {
        "normalise_std": True,
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "zero_variance": "refill",
        "kl_coefficient": 0.0,
    },
    "PPO (RLHF)": PPO
    | {
        "baseline": "gae",
        "group_size": 1,
        "batch_normalise": True,
        "value_clip": 0.2,
        "kl_in": "reward",
        "kl_control": "fixed",
        "critic": "head",
    },
    "online DPO": {"loss": "dpo", "baseline": "none", "dpo_beta": 0.1, "kl_coefficient": 0.0},
    "REINFORCE++": PPO
    | {"baseline": "none", "batch_normalise": True, "kl_in": "reward", "kl_estimator": "k1"},
    "CISPO": {"loss": "cispo", "aggregation": "token_mean"},
    "GSPO": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "decoupled PPO, truncated IS": {"ratio_anchor": "current", "is_correction": "truncated"},
    "PPO, masked IS": {"ratio_anchor": "behaviour", "is_correction": "masked"},
}


def with_flags(flags: str) -> Settings:
    config = get_config()
    config.model.source = "smollm2-135m"
    for path, text in re.findall(r"--config\.(\S+?)=(\S+)", flags):
        try:
            value = ast.literal_eval(text)
        except ValueError:
            value = text
        config.update_from_flattened_dict({path: value})
    return parse_settings(config)


def test_the_table_is_read_whole():
    assert ROWS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("setting", ["loss", "aggregation", "baseline"])
def test_every_choice_has_its_formula(setting):
    table = TEXT.split(f"| `{setting}` |")[1].split("\n\n")[0]
    choices = typing.get_args(typing.get_type_hints(AlgorithmSettings)[setting])
    assert sorted(re.findall(r"^\| `(\w+)` \| \S", table, re.MULTILINE)) == sorted(choices)


@pytest.mark.parametrize("name", EXPECTED)
def test_flags_of(name):
    algorithm = with_flags(ROWS[name]).algorithm
    chosen = {field: getattr(algorithm, field) for field in EXPECTED[name]}
    assert chosen == EXPECTED[name]

import json

from pipeline_rl_jax.evaluation.comparison_table import format_table, table_json
from pipeline_rl_jax.evaluation.run_figures import CommonGround, run_figures

ASKED_FOR = {
    "name",
    "samples_per_second",
    "seconds",
    "reward_final",
    "reward_auc_samples",
    "lag_mean_steps",
    "lag_max_steps",
    "ess_mean",
    "trainer_idle_share",
    "generation_idle_share",
    "step_seconds_median",
}
COMMON = CommonGround(samples=8.0, seconds=2.0)


def make_figures(name):
    rows = [
        {
            "step": 1,
            "run/samples": 8,
            "run/train_seconds": 2.0,
            "trainer/step_seconds": 2.0,
            "trainer/idle_share": 0.25,
            "reward/mean": 0.5,
            "batch/rollouts": 8,
        }
    ]
    return run_figures(name, rows, warmup_steps=0, common=COMMON)


def test_the_text_has_a_line_per_row_and_block():
    text = format_table([make_figures("a"), make_figures("longer")], COMMON, warmup_steps=3)
    lines = text.splitlines()
    assert sum(line.startswith("longer ") for line in lines) == 3
    (speed, *_) = [line for line in lines if line.startswith("a ")]
    assert speed.split()[1:3] == ["4", "4"]
    assert "Rewards at 8 samples, and at 2.0 s after warm-up" in text
    assert "the first 3 steps" in text


def test_the_json_holds_every_figure_asked_for():
    (row,) = json.loads(table_json([(make_figures("a"), [make_figures("a"), make_figures("a")])]))
    assert row.keys() >= ASKED_FOR
    assert row["name"] == "a"
    assert row["trainer_idle_share"] == 0.25
    assert row["lag_mean_steps"] is None
    assert [seed["samples_per_second"] for seed in row["per_seed"]] == [4.0, 4.0]

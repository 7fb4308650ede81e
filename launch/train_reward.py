"""Trains a reward model on preference pairs (Bradley–Terry).

    python launch/train_reward.py --config=configs/train_reward.py --workdir=runs/reward \
        --config.model.source=smollm2-135m --config.data.files=pairs.jsonl

Records are {"prompt", "chosen", "rejected"}, or Stack-Exchange-paired {"question", "response_j",
"response_k"} with the better answer as j. Writes WORKDIR/model, a Hugging Face
`*ForSequenceClassification` directory with one label, and summary.json with the accuracy on
held-out pairs before and after.
"""

from __future__ import annotations

from absl import flags

from command_line import define_config, required, run_main
from pipeline_rl_jax.telemetry.progress import print_line
from pipeline_rl_jax.telemetry.workdir import alone_in, disk_errors, open_workdir

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory for the model and the figures.")


def main() -> None:
    config = required(_CONFIG, example="configs/train_reward.py")

    from pipeline_rl_jax.orchestrate.reward_training import (
        parse_reward_training,
        run_reward_training,
    )

    settings = parse_reward_training(config)
    workdir = open_workdir(required(_WORKDIR, example="runs/reward"))
    with disk_errors(workdir), alone_in(workdir):
        run_reward_training(settings, workdir=workdir, show=print_line)


if __name__ == "__main__":
    run_main(main)

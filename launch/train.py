"""Trains a language model by reinforcement learning.

    python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart

Every setting of the config file can be changed on the command line, for example
`--config.trainer.learning_rate=1e-5`. The same command again resumes the run. `--dry_run` prints
the resolved settings and what would be done, and does nothing.
"""

from __future__ import annotations

from absl import flags

from command_line import define_config, required, run_main
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.telemetry.workdir import open_workdir

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory for checkpoints, metrics, samples and the summary."
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the plan of the run and do nothing.")


def main() -> int:
    settings = parse_settings(required(_CONFIG, example="configs/quickstart.py"))
    workdir = None
    if not _DRY_RUN.value:
        workdir = open_workdir(required(_WORKDIR, example="runs/quickstart"))

    # Only now: a mistake above is told before JAX has even been imported.
    from devices import start_devices
    from pipeline_rl_jax.orchestrate import build

    start_devices(settings)
    if workdir is None:
        print(build.describe(settings))
        return 0
    return build.run(settings, workdir=workdir)


if __name__ == "__main__":
    run_main(main)

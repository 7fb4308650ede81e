"""The program as a person starts it: from any directory, without installing anything."""

import functools

from tests.fakes.launching import launch, lines_of_mistake

train = functools.partial(launch, "train")


def test_several_broken_constraints_are_one_line_each():
    result = train(
        "--config=configs/base.py",
        "--workdir=unused",
        "--config.model.source=smollm2-135m",
        "--config.trainer.batch_rollouts=12",
        "--config.generation.temperature=0",
    )
    first, second = lines_of_mistake(result)
    assert first.startswith("error: generation.temperature (0.0) must be more than 0")
    assert second == (
        "error: trainer.batch_rollouts (12) must be a multiple of algorithm.group_size (8); "
        "use 8 or 16"
    )


def test_config_is_found_from_any_directory(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from configs import base\n\ndef get_config():\n    config = base.get_config()\n"
        "    config.trainer.learnin_rate = 1.0\n    return config\n"
    )
    (line,) = lines_of_mistake(train("--config=mine.py", "--workdir=run", directory=tmp_path))
    assert line == (
        "error: trainer.learnin_rate is not a setting; did you mean trainer.learning_rate?"
    )
    assert not (tmp_path / "run").exists()


def test_workdir_is_asked_for():
    source = "--config.model.source=smollm2-135m"
    (line,) = lines_of_mistake(train("--config=configs/base.py", source))
    assert line == "error: --workdir is missing; for example --workdir=runs/quickstart"


def test_help_lists_the_flags():
    result = train("--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Trains a language model by reinforcement learning.")
    for flag in ("--config:", "--workdir:", "--dry_run:"):
        assert flag in result.stdout

"""How mistakes on the command line look: one line each, with the way out."""

import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from command_line import read_flags, required
from pipeline_rl_jax.settings import SettingsError

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "configs" / "base.py")


@pytest.fixture
def parse(monkeypatch):
    """Parses arguments into fresh flags; ml_collections reads sys.argv by itself."""

    def parse(*arguments):
        flag_values = flags.FlagValues()
        config = config_flags.DEFINE_config_file(
            "config", None, "", lock_config=True, flag_values=flag_values
        )
        workdir = flags.DEFINE_string("workdir", None, "", flag_values=flag_values)
        flags.DEFINE_bool("dry_run", False, "", flag_values=flag_values)
        argv = ["program", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        read_flags(argv, flag_values)
        return config, workdir

    return parse


def problems_of(parse, *arguments):
    with pytest.raises(SettingsError) as caught:
        parse(*arguments)
    return caught.value.problems


def test_overrides_reach_the_config(parse):
    config, workdir = parse(
        f"--config={BASE}",
        "--config.trainer.learning_rate=1e-5",
        "--config.meshes.trainer_devices=0,1",
        "--config.algorithm.normalise_std",
        "--noconfig.data.shuffle",
        "--workdir=here",
    )
    assert config.value.trainer.learning_rate == 1e-5
    assert config.value.meshes.trainer_devices == (0, 1)
    assert config.value.algorithm.normalise_std is True
    assert config.value.data.shuffle is False
    assert workdir.value == "here"


def test_value_apart_from_its_flag(parse):
    config, _ = parse("--config", BASE, "--config.schedule.num_steps", "7")
    assert config.value.schedule.num_steps == 7


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--config.trainer.learnin_rate=1"],
            "trainer.learnin_rate is not a setting; did you mean trainer.learning_rate?",
        ),
        (
            ["--config.max_lag=1"],
            "max_lag is not a setting; did you mean schedule.max_lag?",
        ),
        (
            ["--config.publication=3"],
            "publication is a section; set one of its keys, for example "
            "--config.publication.every_steps=…",
        ),
        (
            ["--config.trainer.learning_rate=abc"],
            "trainer.learning_rate (abc) must be a number; the config file has 1e-06",
        ),
        (
            ["--config.trainer.batch_rollouts=1e3"],
            "trainer.batch_rollouts (1e3) must be a whole number; the config file has 1024",
        ),
        (
            ["--config.algorithm.normalise_std=maybe"],
            "algorithm.normalise_std (maybe) must be True or False; the config file has False",
        ),
        (["--config.=3"], "--config.=3 names no setting; write --config.section.key=value"),
        (["--config."], "--config. names no setting; write --config.section.key=value"),
        (["--dry_run=maybe"], "--dry_run (maybe) must be True or False"),
        (["--workdr=x"], "--workdr is not a flag; did you mean --workdir?"),
        (["--qqq"], "--qqq is not a flag; --help lists the flags"),
        (
            ["--workdir", "a", "b"],
            "'b' belongs to no flag; write --name=value, without spaces around =",
        ),
    ],
)
def test_mistake_is_one_line(parse, arguments, problem):
    assert problems_of(parse, f"--config={BASE}", *arguments) == (problem,)


def test_every_unknown_key_is_told(parse):
    problems = problems_of(parse, f"--config={BASE}", "--config.a=1", "--config.trainer.b=1")
    assert [problem.split()[0] for problem in problems] == ["a", "trainer.b"]


@pytest.mark.parametrize("arguments", [["--config.seed=1"], ["--config.seed=1", "--config", BASE]])
def test_overrides_need_the_config_before_them(parse, arguments):
    (problem,) = problems_of(parse, *arguments)
    assert problem == "--config.seed=1 overrides a key of --config=FILE, which must stand before it"


def test_empty_config(parse):
    (problem,) = problems_of(parse, "--config=")
    assert problem == "--config is empty; for example --config=configs/quickstart.py"


def test_required_flags(parse):
    config, workdir = parse("--workdir=")
    for flag in (config, workdir):
        with pytest.raises(
            SettingsError, match=f"--{flag.name} is missing; for example --{flag.name}=x"
        ):
            required(flag, example="x")


PROGRAM = """
import sys
sys.path.insert(0, {launch!r})
from command_line import run_main
from pipeline_rl_jax.settings import SettingsError

def main():
    {body}

run_main(main)
"""


def run_program(tmp_path, body):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(launch=str(ROOT / "launch"), body=body))
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)


def test_a_mistake_exits_with_2_and_no_traceback(tmp_path):
    result = run_program(tmp_path, "raise SettingsError('a (1) must be 2', 'b (2) must be 3')")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "error: a (1) must be 2\nerror: b (2) must be 3\n"


def test_a_flag_file_that_is_not_there(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(launch=str(ROOT / "launch"), body="return define_config()"))
    path.write_text(path.read_text().replace("import run_main", "import define_config, run_main"))
    path.write_text(path.read_text().replace("def main", "define_config()\n\ndef main"))
    command = [sys.executable, path, "--flagfile=/nonexistent"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --flagfile cannot be read: ")
    assert "No such file or directory: '/nonexistent'" in line


def test_an_error_of_ours_keeps_its_traceback(tmp_path):
    result = run_program(tmp_path, "raise ValueError('bug')")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("ValueError: bug\n")


def test_ctrl_c_is_one_line(tmp_path):
    result = run_program(tmp_path, "raise KeyboardInterrupt")
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_the_exit_code_of_the_program(tmp_path):
    assert run_program(tmp_path, "return 143").returncode == 143


def test_success(tmp_path):
    result = run_program(tmp_path, "print('done')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")

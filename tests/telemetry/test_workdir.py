import errno
import json
import os

import pytest

from pipeline_rl_jax.settings import SettingsError
from pipeline_rl_jax.telemetry.workdir import (
    alone_in,
    disk_errors,
    keep_earlier,
    open_workdir,
    read_config,
    write_atomically,
    write_config,
)
from tests.fakes.settings import make_settings


def test_config_is_read_back(tmp_path):
    workdir = open_workdir(tmp_path / "deep" / "run")
    settings = make_settings(trainer={"learning_rate": 3e-5})
    write_config(workdir, settings)
    assert read_config(workdir) == settings
    assert "trainer.learning_rate = 3e-05" in workdir.config_text.read_text().splitlines()
    assert json.loads(workdir.config.read_text())["meshes"]["trainer_devices"] == [0]


def test_other_settings_on_resume_keep_the_earlier_config(tmp_path):
    workdir = open_workdir(tmp_path)
    first, second = make_settings(), make_settings(trainer={"learning_rate": 3e-5})
    write_config(workdir, first)
    write_config(workdir, first)
    assert not (tmp_path / "config_1.json").exists()
    write_config(workdir, second)
    assert read_config(workdir) == second
    assert json.loads((tmp_path / "config_1.json").read_text())["trainer"]["learning_rate"] == 1e-6


def test_a_file_is_no_workdir(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(SettingsError, match=r"--workdir \(.*taken\) is a file; name another"):
        open_workdir(tmp_path / "taken")
    with pytest.raises(SettingsError, match=r"--workdir \(.*inside\) cannot be made: Not a dir"):
        open_workdir(tmp_path / "taken" / "inside")


def test_a_failed_write_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new and longer")
    assert path.read_text() == "old"


def test_earlier_files_are_numbered(tmp_path):
    path = tmp_path / "trace.json"
    keep_earlier(path)
    for text in ("first", "second"):
        path.write_text(text)
        keep_earlier(path)
    assert not path.exists()
    assert (tmp_path / "trace_1.json").read_text() == "first"
    assert (tmp_path / "trace_2.json").read_text() == "second"


def test_one_process_at_a_time(tmp_path):
    workdir = open_workdir(tmp_path)
    with alone_in(workdir):
        with (
            pytest.raises(SettingsError, match=rf"is in use by process {os.getpid()}, which"),
            alone_in(open_workdir(tmp_path)),
        ):
            pass
        with alone_in(open_workdir(tmp_path / "another")):
            pass
    with alone_in(workdir):  # it is free again
        pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        ValueError("UNKNOWN: Error writing local file: No space left on device [os_error=28]"),
    ],
)
def test_a_full_disk_is_one_line_wherever_it_shows(tmp_path, error):
    line = r"--workdir \(.*\) is on a disk that is full; make room"
    failure = RuntimeError("observer: failed")
    failure.__cause__ = error
    with pytest.raises(SettingsError, match=line), disk_errors(open_workdir(tmp_path)):
        raise failure


def test_other_errors_pass(tmp_path):
    with pytest.raises(OSError, match="else"), disk_errors(open_workdir(tmp_path)):
        raise OSError(errno.EIO, "something else")

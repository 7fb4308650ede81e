from __future__ import annotations

import pytest

from pipeline_rl_jax.models.atomic_directory import atomic_directory


def test_appears_at_the_end(tmp_path):
    target = tmp_path / "deep" / "target"
    with atomic_directory(target) as partial:
        (partial / "file").write_text("content")
        assert not target.exists()
    assert (target / "file").read_text() == "content"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_failure_leaves_nothing(tmp_path):
    def write_half():
        with atomic_directory(tmp_path / "target") as partial:
            (partial / "file").write_text("half")
            raise RuntimeError("the other half")

    with pytest.raises(RuntimeError, match="the other half"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "target"
    with (
        pytest.raises(ValueError, match=r"output \(.*target\) cannot be made: .*; name another"),
        atomic_directory(target),
    ):
        pass


def test_what_exists_is_kept(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with atomic_directory(target) as partial:  # an empty directory may be filled
        (partial / "file").write_text("first")
    with (
        pytest.raises(ValueError, match=r"output \(.*target\) already exists"),
        atomic_directory(target),
    ):
        pass
    assert (target / "file").read_text() == "first"


def test_the_first_of_two_writers_wins(tmp_path):
    target = tmp_path / "target"

    def write_slowly():
        with atomic_directory(target) as slow:
            (slow / "file").write_text("slow")
            with atomic_directory(target) as fast:
                (fast / "file").write_text("fast")

    with pytest.raises(ValueError, match="already exists"):
        write_slowly()
    assert (target / "file").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]

"""The error that wrong settings raise."""

import pytest

from pipeline_rl_jax.settings import SettingsError, settings_errors


def test_every_problem_is_one_line():
    error = SettingsError("first", "second")
    assert error.problems == ("first", "second")
    assert str(error) == "first\nsecond"


def test_a_file_error_becomes_one_line_with_its_cause():
    with pytest.raises(SettingsError) as caught, settings_errors():
        raise ValueError("data.path (x) must be\n  a file")
    assert caught.value.problems == ("data.path (x) must be a file",)
    assert isinstance(caught.value.__cause__, ValueError)


def test_several_problems_stay_several():
    with pytest.raises(SettingsError) as caught, settings_errors():
        raise SettingsError("a", "b")
    assert caught.value.problems == ("a", "b")


def test_an_error_of_ours_passes_through():
    with pytest.raises(KeyError), settings_errors():
        raise KeyError("bug")

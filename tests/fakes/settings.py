"""Settings for tests: the defaults of `configs/base.py` with a few fields changed, unchecked."""

import dataclasses

from configs.base import get_config
from pipeline_rl_jax.settings import AlgorithmSettings, Settings
from pipeline_rl_jax.settings_parsing import parse_settings


def make_algorithm_settings(**changes) -> AlgorithmSettings:
    return AlgorithmSettings(**{**get_config().algorithm.to_dict(), **changes})


def make_settings(**changes_by_section) -> Settings:
    """`make_settings(trainer={"tokens_per_row": 8})`, on top of the checked defaults."""
    config = get_config()
    config.model.source = "smollm2-135m"
    settings = parse_settings(config)
    sections = {
        name: dataclasses.replace(getattr(settings, name), **changes)
        for name, changes in changes_by_section.items()
    }
    return dataclasses.replace(settings, **sections)

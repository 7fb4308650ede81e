"""The tiny byte tokenizer, loaded once."""

import pytest

from pipeline_rl_jax.data.tokenizer import load_tokenizer
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))

"""One pool with math-verify for all tests of the package: importing it takes seconds."""

from collections.abc import Iterator

import pytest

from pipeline_rl_jax.rewards.verifier_pool import VerifierPool

DEADLINE_SECONDS = 2.0


# Started with the first test of the package, so that it imports beside the tests that need no pool.
@pytest.fixture(scope="session", autouse=True)
def answer_pool() -> Iterator[VerifierPool]:
    pool = VerifierPool(num_workers=5, deadline_seconds=DEADLINE_SECONDS, kinds={"equal", "search"})
    yield pool
    pool.close()

"""A completion that is put off to later steps is the one it would have been undisturbed."""

import numpy as np
import pytest

from pipeline_rl_jax.orchestrate import build
from pipeline_rl_jax.orchestrate.device_stages import RewardScoring
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.telemetry.workdir import open_workdir
from tests.fakes.tiny_run import read_metrics, tiny_config, write_tiny_model

BASE = {
    "rewards__correctness": "user",
    "rewards__user_function": "tests.fakes.reward_functions:share_of_vowels",
    "evaluation__at_start": False,
    "evaluation__at_end": False,
    "checkpointing__at_end": False,
    "trainer__learning_rate": 0.0,  # updates come, and change nothing
    "trainer__weight_decay": 0.0,
    "schedule__num_steps": 5,
    "generation__slots": 24,
    "generation__tokens_per_chunk": 2,
    "generation__max_new_tokens": 80,
    "generation__stop_strings": tuple("aeioubcdfg"),  # short ones and a long tail
    "algorithm__group_size": 2,
}
OPPO = {
    "schedule__name": "oppo",
    "schedule__overcommit__variant": "fixed",
    "schedule__overcommit__start_groups": 3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kv_policy", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def test_token_for_token(model, tmp_path, monkeypatch, kv_policy):
    found, score = {}, RewardScoring.score

    async def recorded(self, completion):
        found[completion.prompt.prompt_id, completion.sample_index] = completion
        return await score(self, completion)

    monkeypatch.setattr(RewardScoring, "score", recorded)

    def run(name, **changes):
        found.clear()
        settings = parse_settings(tiny_config(model, **(BASE | changes)))
        assert build.run(settings, workdir=open_workdir(tmp_path / name)) == 0
        return dict(found), read_metrics(tmp_path / name)

    plain, _ = run("plain", schedule__name="conventional")
    deferred, metrics = run("oppo", **OPPO, generation__kv_policy=kv_policy)
    assert max(line["overcommit/deferrals_max_steps"] for line in metrics) > 0
    mixed = [key for key, completion in deferred.items() if completion.mixes_versions]
    assert any(key in plain for key in mixed)
    for key in plain.keys() & deferred.keys():
        np.testing.assert_array_equal(deferred[key].token_ids, plain[key].token_ids, str(key))
        np.testing.assert_allclose(deferred[key].logprobs, plain[key].logprobs, atol=1e-4)
        assert deferred[key].stop_reason is plain[key].stop_reason

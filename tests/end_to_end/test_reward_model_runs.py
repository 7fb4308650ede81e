"""Runs whose reward is a model's, on devices of its own: streamed or not, rewards are equal."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from pipeline_rl_jax.orchestrate import build
from pipeline_rl_jax.orchestrate.device_stages import RewardScoring
from pipeline_rl_jax.orchestrate.failures import StageFailure
from pipeline_rl_jax.orchestrate.frozen_models import load_frozen_models
from pipeline_rl_jax.orchestrate.parts import build_parts
from pipeline_rl_jax.preprocess.batches import assemble
from pipeline_rl_jax.records import Group
from pipeline_rl_jax.rewards.streamed_model import StreamedModel
from pipeline_rl_jax.settings import SettingsError
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.telemetry.schema import check_names
from pipeline_rl_jax.telemetry.workdir import open_workdir
from tests.fakes.tiny_run import (
    read_metrics,
    tiny_config,
    write_tiny_model,
    write_tiny_reward_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"Write about {n}."}) for n in range(60)))
    return path


@pytest.fixture(scope="module")
def reward_model(model, tmp_path_factory):
    return write_tiny_reward_model(tmp_path_factory.mktemp("reward") / "model", model)


@pytest.fixture
def settings_of(model, reward_model, prompts):
    def make(**changes):
        settings = {
            "reward_model__source": str(reward_model),
            "reward_model__rows": 6,
            "reward_model__chunk_widths": (4, 16),
            "reward_model__min_cache_tokens": 64,
            "reward_model__param_dtype": "float32",
            "reward_model__compute_dtype": "float32",
            "reward_model__cache_dtype": "float32",
            "rewards__correctness": "none",
            "meshes__scoring_devices": (2,),
            "data__source": "files",
            "data__path": str(prompts),
            "data__format": "mapped",
            "data__problem_field": "prompt",
            "data__prompt_format": "{problem}",
            "generation__max_new_tokens": 20,
            "generation__tokens_per_chunk": 7,
            "schedule__name": "conventional",
            "schedule__num_steps": 2,
            "trainer__learning_rate": 1e-3,
            "checkpointing__at_end": False,
            "evaluation__at_start": False,
            **changes,
        }
        return parse_settings(tiny_config(model, **settings))

    return make


def run(settings, workdir):
    assert build.run(settings, workdir=open_workdir(workdir)) == 0
    lines = read_metrics(workdir)
    for line in lines:
        check_names(set(line) - {"step", "run_attempt", "unix_seconds"})
    return [line for line in lines if "trainer/loss" in line], lines[-1]


@pytest.fixture
def rollouts(monkeypatch):
    """Every rollout of the runs of a test, by prompt and sample; cleared between runs."""
    found, score = {}, RewardScoring.score

    async def recorded(self, completion):
        rollout = await score(self, completion)
        found[completion.prompt.prompt_id, completion.sample_index] = rollout
        return rollout

    monkeypatch.setattr(RewardScoring, "score", recorded)
    return found


def take_rewards(rollouts):
    rewards = {key: rollout.reward for key, rollout in rollouts.items()}
    rollouts.clear()
    return rewards


def test_streamed_rewards_are_those_of_whole_texts(settings_of, rollouts, tmp_path, capsys):
    """Over two steps and the evaluation after them, so updates by equal rewards are equal too."""
    whole_steps, whole_last = run(settings_of(reward_model__streaming=False), tmp_path / "whole")
    expected = take_rewards(rollouts)
    assert whole_steps[0]["reward/std"] > 0.1
    assert whole_steps[0]["scoring/streamed_tokens"] == 0
    assert 0 < whole_steps[0]["scoring/idle_share"] < 1
    steps, last = run(settings_of(telemetry__timeline=True), tmp_path / "7")
    assert len(expected) == 32
    assert take_rewards(rollouts) == pytest.approx(expected, abs=1e-5)
    mean = whole_last["evaluation/mean_reward"]
    assert last["evaluation/mean_reward"] == pytest.approx(mean, abs=1e-5)
    # How far reading keeps up with decoding is a matter of the machine's; the first chunk is read
    # before there is an end.
    assert sum(step["scoring/streamed_tokens"] for step in steps) > 0
    tokens = steps[1]["scoring/streamed_tokens"] + steps[1]["scoring/final_tokens"]
    assert tokens == whole_steps[1]["scoring/final_tokens"]
    assert "score_chunk" in (tmp_path / "7" / "trace.json").read_text()
    summary = json.loads((tmp_path / "7" / "summary.json").read_text())
    assert summary["accuracy_after"] is None
    assert summary["reward_after"] == pytest.approx(last["evaluation/mean_reward"])
    assert "greedy reward" in capsys.readouterr().out
    assert "gold answer" not in (tmp_path / "7" / "samples" / "step_000001.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_chunk", [1, 64])
def test_and_so_they_are_for_the_shortest_and_the_longest_chunks(
    settings_of, rollouts, tmp_path, tokens_per_chunk
):
    run(settings_of(reward_model__streaming=False), tmp_path / "whole")
    expected = take_rewards(rollouts)
    run(settings_of(generation__tokens_per_chunk=tokens_per_chunk), tmp_path / "chunks")
    assert take_rewards(rollouts) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_deferred_completions_keep_their_rows_over_steps(settings_of, rollouts, tmp_path):
    """And the reference reads along. Each rollout is as if its whole text had been scored."""
    oppo = {
        "schedule__name": "oppo",
        "schedule__num_steps": 6,
        "schedule__overcommit__variant": "fixed",
        "schedule__overcommit__start_groups": 2,
        "generation__slots": 24,
        "generation__tokens_per_chunk": 2,
        "generation__max_new_tokens": 80,
        "generation__stop_strings": tuple("aeioubcdfg"),  # short ones and a long tail
        "algorithm__kl_coefficient": 0.1,
        "algorithm__group_size": 2,
        "evaluation__at_end": False,
    }
    settings = settings_of(**oppo, algorithm__reference_streaming=True)
    steps, _ = run(settings, tmp_path)
    assert max(step["overcommit/deferrals_max_steps"] for step in steps) > 0
    assert steps[-1]["policy/kl_to_reference_k3_nats"] > 0
    assert sum(step["scoring/reference_final_tokens"] for step in steps) > 0
    found = list(rollouts.values())
    assert any(rollout.completion.mixes_versions for rollout in found)
    scores, logprobs = score_whole_texts(settings_of(**oppo, reward_model__streaming=False), found)
    assert [rollout.reward for rollout in found] == pytest.approx(scores, abs=1e-5)
    carried = np.concatenate([rollout.reference_logprobs for rollout in found])
    np.testing.assert_allclose(carried, logprobs, rtol=0, atol=1e-5)


def score_whole_texts(settings, rollouts):
    """Rewards, and reference logprobs end to end, by the models of a run that streams nothing."""
    parts = build_parts(settings)
    models = load_frozen_models(parts)

    async def scores():
        scored = await asyncio.gather(*(parts.scorer.score(r.completion) for r in rollouts))
        await parts.scorer.close()
        return [each.reward for each in scored]

    groups = [
        Group(
            prompt=r.completion.prompt, rollouts=(dataclasses.replace(r, reference_logprobs=None),)
        )
        for r in rollouts
    ]
    keeping = dataclasses.replace(
        settings, algorithm=dataclasses.replace(settings.algorithm, truncated="train")
    )
    batch = assemble(groups, keeping, reference_logprobs=models.reference.logprobs).batch
    mask = np.asarray(batch.loss_mask)
    by_rollout = np.argsort(np.asarray(batch.sequence_index)[mask], kind="stable")
    return asyncio.run(scores()), np.asarray(batch.reference_logprobs)[mask][by_rollout]


@pytest.mark.slow
def test_weights_in_flight_and_a_resumed_run(settings_of, tmp_path):
    changes = {
        "schedule__name": "pipeline",
        "checkpointing__at_end": True,
        "evaluation__at_end": False,
    }
    run(settings_of(**changes), tmp_path)
    steps, _ = run(settings_of(**changes, schedule__num_steps=3), tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    first, second, resumed = (step["scoring/streamed_tokens"] for step in steps)
    assert first + second > 0
    assert resumed > 0
    assert all(step["reward/reward_model_mean"] != 0 for step in steps)


@pytest.mark.parametrize("schedule", ["pipeline", "oppo"])
def test_an_error_of_the_reading_model_ends_the_run_named(
    settings_of, tmp_path, monkeypatch, schedule
):
    calls, extend = [], StreamedModel.extend

    def fail_later(self, entries):
        calls.append(entries)
        if len(calls) > 2:
            raise RuntimeError("device lost")
        return extend(self, entries)

    monkeypatch.setattr(StreamedModel, "extend", fail_later)
    settings = settings_of(schedule__name=schedule, evaluation__at_end=False)
    with pytest.raises(StageFailure, match="scoring: RuntimeError: device lost"):
        build.run(settings, workdir=open_workdir(tmp_path))


def test_another_tokenizer_is_refused_for_streaming_only(
    settings_of, model, reward_model, tmp_path
):
    other = write_tiny_reward_model(tmp_path / "other", model)
    content = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(content.replace("<|end|>", "<|over|>"))
    assert (other / "tokenizer.json").read_text() != content
    with pytest.raises(SettingsError, match=r"reward_model\.streaming=False") as error:
        build.run(
            settings_of(reward_model__source=str(other)), workdir=open_workdir(tmp_path / "run")
        )
    assert "\n" not in str(error.value)


def test_dry_run_names_the_reward_model(settings_of):
    text = build.describe(settings_of())
    for part in ("27,200 parameters", "scoring: data=1", "reward model KV cache", "streamed: 6"):
        assert part in text
    assert "whole texts, 6 at once" in build.describe(settings_of(reward_model__streaming=False))

"""A model that reads along says what it says of whole texts, however they are cut."""

import asyncio
import dataclasses
import threading
import types

import jax
import numpy as np
import pytest

from pipeline_rl_jax.data.vocabulary import own_tokens
from pipeline_rl_jax.meshes import build_meshes
from pipeline_rl_jax.orchestrate.frozen_models import load_frozen_models
from pipeline_rl_jax.orchestrate.parts import Parts
from pipeline_rl_jax.orchestrate.reference_model import ReferenceModel
from pipeline_rl_jax.orchestrate.scoring_model import ScoringModel
from pipeline_rl_jax.preprocess.batches import assemble
from pipeline_rl_jax.records import Group, Rollout
from pipeline_rl_jax.rewards.scorer import CompletionScorer
from tests.fakes.settings import make_settings
from tests.fakes.tiny_engine import TINY
from tests.fakes.tiny_reward_model import cut, make_completion
from tests.fakes.tiny_run import write_tiny_model, write_tiny_reward_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reward_model(model, tmp_path_factory):
    return write_tiny_reward_model(tmp_path_factory.mktemp("reward") / "model", model)


def parts_of(model, reward_model, *, streaming, reference_devices=()):
    settings = make_settings(
        model={"init": "random", "compute_dtype": "float32"},
        algorithm={"kl_coefficient": 0.1, "reference_streaming": streaming},
        generation={"max_prompt_tokens": 40, "max_new_tokens": 40, "temperature": 0.7},
        trainer={"tokens_per_row": 128, "rows_per_micro_batch": 2},
        reward_model={
            "source": str(reward_model),
            "weight": 2.0,
            "streaming": streaming,
            "rows": 6,
            "chunk_widths": (8, 32),
            "min_cache_tokens": 128,
            "param_dtype": "float32",
            "compute_dtype": "float32",
            "cache_dtype": "float32",
        },
        meshes={"scoring_devices": (2,), "reference_devices": reference_devices},
    )
    parts = types.SimpleNamespace(
        settings=settings,
        config=TINY,
        meshes=build_meshes(settings.meshes, jax.devices()),
        reference=ReferenceModel(directory=model, config=TINY, is_start=True),
        reward_model=ScoringModel(directory=reward_model, config=TINY, tokens_of=own_tokens),
        scorer=CompletionScorer({}),
        order=threading.Lock(),
        order_beside=threading.Lock(),
    )
    parts.order_of = lambda mesh: Parts.order_of(parts, mesh)
    parts.load_reference = lambda: Parts.load_reference(parts)
    return parts


def chunks_of(completion, size):
    whole, rest = divmod(completion.num_tokens, size)
    return cut(completion, [size] * whole + [rest] * bool(rest))


# Ends before, at and after the borders of chunks of 7, and one that only chunks of 64 hold whole.
COMPLETIONS = [
    make_completion(i, prompt_tokens=3 + i, num_tokens=num_tokens)
    for i, num_tokens in enumerate([1, 6, 7, 8, 14, 37])
]


def streamed(models, scorer, *, size):
    async def scenario():
        queues = [chunks_of(completion, size) for completion in COMPLETIONS]
        for turn in range(max(map(len, queues))):
            models.readers.read([chunks[turn] for chunks in queues if turn < len(chunks)])
        readouts = [await models.readers.finish(completion) for completion in COMPLETIONS]
        evaluated = [await scorer.score(completion) for completion in COMPLETIONS]
        return readouts, [scored.reward for scored in evaluated]

    return asyncio.run(scenario())


def test_scores_and_reference_logprobs_are_those_of_whole_texts(model, reward_model):
    whole = parts_of(model, reward_model, streaming=False)
    unstreamed = load_frozen_models(whole)
    assert unstreamed.readers.names == ()

    async def score_whole():
        scored = await asyncio.gather(*map(whole.scorer.score, COMPLETIONS))
        await whole.scorer.close()
        return [each.components["reward_model"] for each in scored]

    expected_scores = asyncio.run(score_whole())
    assert np.ptp(expected_scores) > 0.1
    groups = [
        Group(prompt=c.prompt, rollouts=(Rollout(completion=c, reward=0.0),)) for c in COMPLETIONS
    ]
    batch = assemble(groups, whole.settings, reference_logprobs=unstreamed.reference.logprobs).batch

    parts = parts_of(model, reward_model, streaming=True, reference_devices=(3, 4))
    models = load_frozen_models(parts)
    assert models.reference is None
    assert models.whole_texts is None
    for size in (1, 7, 64):
        readouts, evaluated = streamed(models, parts.scorer, size=size)
        scores = [float(readout["reward_model"]) for readout in readouts]
        assert scores == pytest.approx(expected_scores, abs=1e-5)
        assert evaluated == pytest.approx([2 * score for score in scores], abs=1e-5)
        carried = [
            dataclasses.replace(
                group,
                rollouts=(
                    dataclasses.replace(group.rollouts[0], reference_logprobs=readout["reference"]),
                ),
            )
            for group, readout in zip(groups, readouts, strict=True)
        ]
        again = assemble(carried, parts.settings).batch
        np.testing.assert_allclose(
            again.reference_logprobs, batch.reference_logprobs, rtol=0, atol=1e-5
        )
    assert np.ptp(np.asarray(batch.reference_logprobs)[np.asarray(batch.loss_mask)]) > 0.1
    assert models.readers.num_live == 0
    asyncio.run(models.readers.close())


def test_without_frozen_models_nothing_is_loaded(model, reward_model):
    parts = parts_of(model, reward_model, streaming=True)
    parts.reference = parts.reward_model = None
    models = load_frozen_models(parts)
    assert (models.reference, models.whole_texts, models.readers.names) == (None, None, ())

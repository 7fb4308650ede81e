"""The adapters between packages and protocols."""

import asyncio
import dataclasses

import numpy as np

from pipeline_rl_jax.orchestrate.device_stages import (
    BatchPreprocess,
    DevicePublication,
    EngineGeneration,
    MeshTraining,
    RewardScoring,
)
from pipeline_rl_jax.orchestrate.threads import StageThread
from pipeline_rl_jax.rewards.score import ScoredCompletion, ScoringFailure
from tests.fakes.rollouts import make_completion, make_group, make_prompt
from tests.fakes.settings import make_settings


class Batcher:
    num_open_samples, num_live = 3, 5

    def __init__(self):
        self.calls = []

    def admit(self, prompt, group_size):
        self.calls.append(("admit", group_size))

    def advance(self, weights):
        self.calls.append(("advance", weights))
        return ["done"]

    def cancel_all(self):
        self.calls.append("cancel")


def test_generation_works_in_its_thread():
    batcher = Batcher()
    stage = EngineGeneration(batcher, StageThread("generation"))
    stage.admit(make_prompt(), 4)
    assert asyncio.run(stage.advance("weights")) == ["done"]
    stage.cancel_all()
    assert batcher.calls == [("admit", 4), ("advance", "weights"), "cancel"]
    assert (stage.num_open_samples, stage.num_live) == (3, 5)


def test_scores_become_rollouts_and_failures_stay_failures():
    class Scorer:
        def __init__(self, result):
            self.result = result

        async def score(self, completion):
            return self.result

    completion = make_completion(make_prompt(), [1])
    scored = ScoredCompletion(reward=0.5, components={"correctness": 1.0}, correct=1.0)
    rollout = asyncio.run(RewardScoring(Scorer(scored)).score(completion))
    assert (rollout.reward, dict(rollout.reward_components)) == (0.5, {"correctness": 1.0})
    failure = ScoringFailure(reason="gone")
    assert asyncio.run(RewardScoring(Scorer(failure)).score(completion)) is failure


def test_preprocess_counts_what_it_leaves_out():
    settings = make_settings(trainer={"tokens_per_row": 16, "rows_per_micro_batch": 1})
    settings = dataclasses.replace(
        settings, algorithm=dataclasses.replace(settings.algorithm, zero_variance="drop")
    )
    stage = BatchPreprocess(settings, StageThread("preprocess"))
    groups = [make_group(0, [0.0, 1.0]), make_group(1, [1.0, 1.0])]
    prepared = asyncio.run(stage.assemble(groups, 0))
    assert prepared.dropped == {"zero_variance": 2}
    assert int(prepared.batch.num_sequences) == 2
    assert stage.refuse(groups[0]) is None


def test_training_reports_speed_and_tells_the_profiler_the_step():
    class Output:
        def fetch(self):
            return {"trainer/loss": 1.0}

    class Trainer:
        version = 4

        def train(self, batch):
            return Output()

    class Profile:
        steps: list = []  # noqa: RUF012

        def before_step(self, step):
            self.steps.append(("before", step))

        def after_step(self, step):
            self.steps.append(("after", step))

    class Batch:
        segment_ids = np.array([[1, 1, 0], [1, 0, 0]])

    stage = MeshTraining(Trainer(), StageThread("training"), profile=Profile())
    metrics = asyncio.run(stage.train(Batch()))
    assert metrics["trainer/loss"] == 1.0
    tokens = metrics["trainer/tokens_per_second"] * metrics["trainer/busy_seconds"]
    np.testing.assert_allclose(tokens, 3.0)
    assert Profile.steps == [("before", 5), ("after", 5)]


def test_a_version_is_published_once():
    class Channel:
        versions: list = []  # noqa: RUF012

        def publish(self, version, params):
            self.versions.append((version, params))

    class Trainer:
        class state:
            params = "params"

    stage = DevicePublication(Channel(), None, trainer=Trainer())
    for version in (0, 0, 1):
        stage.publish(version)
    assert Channel.versions == [(0, "params"), (1, "params")]

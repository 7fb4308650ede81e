"""The adapters between packages and protocols."""

import asyncio
import contextlib
import dataclasses

import numpy as np

from pipeline_rl_jax.models.value_head import VALUE_HEAD
from pipeline_rl_jax.orchestrate.device_stages import (
    BatchPreprocess,
    DevicePublication,
    EngineGeneration,
    MeshTraining,
    RewardScoring,
)
from pipeline_rl_jax.orchestrate.threads import StageThread
from pipeline_rl_jax.rewards.score import Score, ScoredCompletion, ScoringFailure
from tests.fakes.rollouts import make_completion, make_group, make_prompt
from tests.fakes.settings import make_settings


class Order(contextlib.AbstractContextManager):
    """Counts how often it is held."""

    num_taken = 0

    def __enter__(self):
        self.num_taken += 1

    def __exit__(self, *error):
        return None


class Batcher:
    num_open_samples, num_live = 3, 5

    def __init__(self):
        self.calls = []

    def admit(self, prompt, group_size):
        self.calls.append(("admit", group_size))

    def advance(self, weights):
        self.calls.append(("advance", weights))
        return ["done"]

    def take_chunks(self):
        return ["chunk"]

    def cancel_all(self):
        self.calls.append("cancel")


def test_generation_works_in_its_thread():
    batcher = Batcher()
    stage = EngineGeneration(batcher, StageThread("generation"))
    stage.admit(make_prompt(), 4)
    assert asyncio.run(stage.advance("weights")) == ["done"]
    assert stage.take_chunks() == ["chunk"]
    stage.cancel_all()
    assert batcher.calls == [("admit", 4), ("advance", "weights"), "cancel"]
    assert (stage.num_open_samples, stage.num_live) == (3, 5)


def test_scores_become_rollouts_and_failures_stay_failures():
    class Scorer:
        def __init__(self, result):
            self.result = result

        async def score(self, completion, *, known):
            self.known = known
            return self.result

    class Readers:
        def __init__(self, readouts):
            self.readouts, self.calls = readouts, []

        def read(self, chunks):
            self.calls.append(chunks)

        async def finish(self, completion):
            return self.readouts

        def forget(self, completion):
            self.calls.append(completion)

        def forget_all(self):
            self.calls.append("all")

    completion = make_completion(make_prompt(), [1])
    scored = ScoredCompletion(reward=0.5, components={"correctness": 1.0}, correct=1.0)
    stage = RewardScoring(Scorer(scored), Readers({}))
    rollout = asyncio.run(stage.score(completion))
    assert (rollout.reward, dict(rollout.reward_components)) == (0.5, {"correctness": 1.0})
    assert rollout.reference_logprobs is None
    failure = ScoringFailure(reason="gone")
    assert asyncio.run(RewardScoring(Scorer(failure), Readers({})).score(completion)) is failure
    scorer, logprobs = Scorer(scored), np.full(1, -2.0, np.float32)
    readers = Readers({"reward_model": np.float32(1.5), "reference": logprobs})
    stage = RewardScoring(scorer, readers)
    stage.read(["chunk"])
    assert asyncio.run(stage.score(completion)).reference_logprobs is logprobs
    assert scorer.known == {"reward_model": Score(value=1.5)}
    stage.forget(completion)
    stage.forget_all()
    assert readers.calls == [["chunk"], completion, "all"]


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


def test_refused_groups_are_measured_with_the_next_batch():
    """A filter must not flatter the reward curve."""
    settings = make_settings(
        trainer={"tokens_per_row": 16, "rows_per_micro_batch": 1, "batch_rollouts": 8},
        algorithm={"zero_variance": "refill", "group_size": 8, "max_refill_share": 1.0},
    )
    stage = BatchPreprocess(settings, StageThread("preprocess"))
    useless, useful = make_group(0, [0.0, 0.0]), make_group(1, [1.0, 0.0])
    assert stage.refuse(useless) == "zero_variance"
    assert stage.refuse(make_group(2, [1.0, 1.0])) is None  # the allowance is used up
    assert stage.refuse(useful) is None

    async def two_batches():
        return [await stage.assemble([useful], version) for version in (0, 1)]

    first, second = asyncio.run(two_batches())
    assert first.metrics["reward/mean"] == 0.25
    assert first.metrics["group/zero_variance_share"] == 0.5
    assert first.metrics["group/refused_groups"] == 1
    assert first.metrics["group/kept_unwillingly_groups"] == 1
    assert int(first.batch.num_sequences) == 2
    assert first.dropped == {}  # the schedule counts what it dropped
    assert second.metrics["reward/mean"] == 0.5
    assert second.metrics["group/refused_groups"] == 0


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

    order = Order()
    stage = MeshTraining(Trainer(), StageThread("training"), profile=Profile(), order=order)
    metrics = asyncio.run(stage.train(Batch()))
    assert metrics["trainer/loss"] == 1.0
    tokens = metrics["trainer/tokens_per_second"] * metrics["trainer/busy_seconds"]
    np.testing.assert_allclose(tokens, 3.0)
    assert Profile.steps == [("before", 5), ("after", 5)]
    assert order.num_taken == 1


def test_a_version_is_published_once():
    class Channel:
        versions: list = []  # noqa: RUF012

        def publish(self, version, params):
            self.versions.append((version, params))

    class Trainer:
        class state:
            params = {"embedding": 1, VALUE_HEAD: 2}  # noqa: RUF012

    order = Order()
    stage = DevicePublication(Channel(), None, trainer=Trainer(), order=order)
    for version in (0, 0, 1):
        stage.publish(version)
    # The value head stays behind.
    assert Channel.versions == [(0, {"embedding": 1}), (1, {"embedding": 1})]
    assert order.num_taken == 2

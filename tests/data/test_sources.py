import dataclasses
import json

import pytest

from pipeline_rl_jax.data.sources import split_problems
from pipeline_rl_jax.settings import ArithmeticSettings, ReasoningGymSettings
from tests.fakes.settings import make_settings


def make_arithmetic(max_operand=9, num_records=500):
    return ArithmeticSettings(
        operations="+",
        min_operand=0,
        max_operand=max_operand,
        num_operands=2,
        first_operand_tail=0.0,
        num_records=num_records,
    )


def write_problems(path, texts):
    lines = [json.dumps({"problem": text, "answer": "1"}) for text in texts]
    path.write_text("\n".join(lines))
    return str(path)


def file_split(path, *, num_prompts, evaluation_path="", seed=0, **data):
    return split_problems(
        make_settings(
            data={"source": "files", "path": path, **data},
            evaluation={"num_prompts": num_prompts, "path": evaluation_path},
        )
    )


def texts(problems):
    return [problems[index].problem for index in range(len(problems))]


def test_arithmetic_holds_distinct_problems_out():
    settings = make_settings(
        data={"arithmetic": make_arithmetic(max_operand=49, num_records=3000)},
        evaluation={"num_prompts": 100},
    )
    split = split_problems(settings)
    evaluation = texts(split.evaluation)
    assert split.held_out
    assert len(evaluation) == len(set(evaluation)) == 100
    assert not set(evaluation) & set(texts(split.training))


def test_a_tiny_space_is_evaluated_and_trained_on_and_says_so():
    settings = make_settings(
        data={"arithmetic": make_arithmetic()}, evaluation={"num_prompts": 100}
    )
    split = split_problems(settings)
    assert len(set(texts(split.evaluation))) == 100
    assert set(texts(split.evaluation)) & set(texts(split.training))
    assert not split.held_out
    assert split.note == (
        "evaluation: there are only 100 distinct problems, so training sees these too"
    )


def test_more_prompts_than_problems_gives_every_problem_once():
    settings = make_settings(
        data={"arithmetic": make_arithmetic(max_operand=2)}, evaluation={"num_prompts": 100}
    )
    assert len(set(texts(split_problems(settings).evaluation))) == 9


def test_the_evaluation_set_is_the_same_for_every_seed(tmp_path):
    for data in (
        {"arithmetic": make_arithmetic(max_operand=99)},
        {"source": "files", "path": write_problems(tmp_path / "a.jsonl", map(str, range(300)))},
    ):
        first, second = (
            split_problems(
                make_settings(data=data, evaluation={"num_prompts": 5})
                if seed is None
                else make_seeded(seed, data)
            )
            for seed in (None, 7)
        )
        assert texts(first.evaluation) == texts(second.evaluation)


def make_seeded(seed, data):
    import dataclasses

    settings = make_settings(data=data, evaluation={"num_prompts": 5})
    return dataclasses.replace(settings, seed=seed)


def test_files_hold_out_by_text_so_duplicates_do_not_leak(tmp_path):
    names = [f"problem {number}" for number in range(200)]
    path = write_problems(tmp_path / "a.jsonl", [*names, *(f"{name} " for name in names)])
    split = file_split(path, num_prompts=20)
    evaluation = texts(split.evaluation)
    assert len(evaluation) == len(set(evaluation)) == 20
    assert len(split.training) == 360
    assert not set(evaluation) & set(texts(split.training))
    assert evaluation == [name for name in names if name in set(evaluation)]  # the file's order


def test_adding_records_keeps_the_others_where_they_were(tmp_path):
    names = [f"problem {number}" for number in range(200)]
    before = set(
        texts(file_split(write_problems(tmp_path / "a.jsonl", names), num_prompts=10).evaluation)
    )
    path = write_problems(tmp_path / "a.jsonl", [*names, "one more"])
    after = set(texts(file_split(path, num_prompts=10).evaluation))
    assert len(before & after) >= 9


def test_a_small_file_is_shared(tmp_path):
    split = file_split(write_problems(tmp_path / "a.jsonl", "abc"), num_prompts=100)
    assert texts(split.training) == texts(split.evaluation) == ["a", "b", "c"]
    assert not split.held_out


def test_problems_of_the_evaluation_file_leave_training(tmp_path):
    training = write_problems(tmp_path / "a.jsonl", ["a", "b  b", "c"])
    benchmark = tmp_path / "b.jsonl"  # in another layout
    benchmark.write_text('{"question": "b b", "answer": "#### 2"}')
    split = file_split(training, num_prompts=100, evaluation_path=str(benchmark), format="math")
    assert texts(split.evaluation) == ["b b"]
    assert texts(split.training) == ["a", "c"]
    assert split.held_out
    assert "1 records of data.path removed" in split.note


def test_an_evaluation_file_that_is_the_training_file_is_an_error(tmp_path):
    path = write_problems(tmp_path / "a.jsonl", "abc")
    with pytest.raises(ValueError, match=r"evaluation\.path .* holds every problem of data\.path"):
        file_split(path, num_prompts=100, evaluation_path=path)


def test_incomplete_records_follow_the_setting(tmp_path):
    path = write_problems(tmp_path / "a.jsonl", ["a", "", "b"])
    with pytest.raises(ValueError, match="line 2"):
        file_split(path, num_prompts=1)
    assert texts(file_split(path, num_prompts=1, incomplete="drop").training) == ["a", "b"]


def test_the_fingerprint_changes_with_the_training_problems(tmp_path):
    names = [str(number) for number in range(100)]
    path = write_problems(tmp_path / "a.jsonl", names)
    same = file_split(path, num_prompts=5).fingerprint
    assert file_split(path, num_prompts=5).fingerprint == same
    assert file_split(path, num_prompts=6).fingerprint != same
    write_problems(tmp_path / "a.jsonl", [*names[:-1], "other"])
    assert file_split(path, num_prompts=5).fingerprint != same

    def arithmetic(**changes):
        return split_problems(
            make_settings(
                data={"arithmetic": make_arithmetic(**changes)}, evaluation={"num_prompts": 5}
            )
        ).fingerprint

    assert arithmetic() == arithmetic() != arithmetic(max_operand=10)


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def _package(self):
        pytest.importorskip("reasoning_gym")

    def split(self, task, *, num_prompts=10, options="{}", **rewards):
        gym = ReasoningGymSettings(task=task, num_records=100, options=options)
        return split_problems(
            make_settings(
                data={"source": "reasoning_gym", "reasoning_gym": gym},
                evaluation={"num_prompts": num_prompts},
                rewards=rewards,
            )
        )

    def test_held_out(self):
        split = self.split("chain_sum")
        assert split.held_out
        assert len(split.evaluation) == 10
        assert not set(texts(split.evaluation)) & set(texts(split.training))

    def test_few_distinct_problems_are_shared(self):
        options = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
        split = self.split("chain_sum", num_prompts=100, options=options)
        assert not split.held_out
        assert set(texts(split.evaluation)) & set(texts(split.training))

    def test_a_task_without_gold_answers_needs_a_user_function(self):
        with pytest.raises(ValueError, match=r"\(rush_hour\).*rewards\.correctness=user"):
            self.split("rush_hour", num_prompts=1)
        split = self.split("rush_hour", num_prompts=1, correctness="user")
        assert split.evaluation[0].answer == ""
        assert split.evaluation[0].metadata["reasoning_gym"]


def test_prompts_without_answers_are_for_a_reward_model(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"topic {n}"}) for n in range(40)))
    settings = make_settings(
        data={
            "source": "files",
            "path": str(path),
            "format": "mapped",
            "problem_field": "prompt",
        },
        rewards={"correctness": "none"},
        evaluation={"num_prompts": 3},
    )
    split = split_problems(settings)
    assert len(split.evaluation) == 3
    assert len(split.training) == 37
    assert {problem.answer for problem in split.training} == {""}
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "another"}))
    own = dataclasses.replace(settings.evaluation, path=str(held_out))
    split = split_problems(dataclasses.replace(settings, evaluation=own))
    assert texts(split.evaluation) == ["another"]

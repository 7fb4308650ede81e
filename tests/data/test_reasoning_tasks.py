import sys

import pytest

from pipeline_rl_jax.data.reasoning_tasks import ReasoningProblems
from pipeline_rl_jax.settings import ReasoningGymSettings


def make_task(task="chain_sum", options="{}"):
    return ReasoningGymSettings(task=task, num_records=50, options=options)


def test_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        ReasoningProblems(make_task(), seed=0, num_records=5)


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def _package(self):
        pytest.importorskip("reasoning_gym")

    def test_entries_depend_on_seed_and_index_only(self):
        first = ReasoningProblems(make_task(), seed=5, num_records=10)
        second = ReasoningProblems(make_task(), seed=5, num_records=10)
        assert [second[i].problem for i in (7, 3)] == [first[7].problem, first[3].problem]
        assert ReasoningProblems(make_task(), seed=6, num_records=10)[3] != first[3]

    def test_problem_answer_and_what_its_scorer_needs(self):
        import reasoning_gym

        problem = ReasoningProblems(make_task(), seed=1, num_records=3)[2]
        assert problem.task == "chain_sum"
        expression = problem.problem.split(": ")[1].removesuffix("=")
        total, sign = 0, 1
        for word in expression.split():
            if word in "+-":
                sign = 1 if word == "+" else -1
            else:
                total += sign * int(word)
        assert problem.answer == str(total)
        score = reasoning_gym.get_score_answer_fn("chain_sum")
        entry = {"answer": problem.answer, "metadata": problem.metadata["reasoning_gym"]}
        assert score(str(total), entry) == 1.0
        assert score("x", entry) < 1.0

    def test_held_out_problems_are_replaced(self):
        options = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
        plain = ReasoningProblems(make_task(options=options), seed=1, num_records=100)
        held_out = frozenset({plain[0].key, plain[1].key})
        kept = ReasoningProblems(
            make_task(options=options), seed=1, num_records=100, held_out=held_out
        )
        assert not {kept[index].key for index in range(100)} & held_out
        assert kept.share_held_out(2) == 1.0
        unchanged = [i for i in range(100) if plain[i].key not in held_out]
        assert all(kept[i] == plain[i] for i in unchanged)

    def test_nothing_left_is_an_error_not_a_loop(self):
        plain = ReasoningProblems(make_task(), seed=1, num_records=3)
        held_out = frozenset(plain[index].key for index in range(3))
        kept = ReasoningProblems(make_task(), seed=1, num_records=3, held_out=held_out)
        with pytest.raises(ValueError, match="hardly a problem that is not held out"):
            kept[0]

    def test_unknown_task_suggests_close_ones(self):
        with pytest.raises(ValueError, match=r"\(chian_sum\) is not known; did you mean chain_sum"):
            ReasoningProblems(make_task(task="chian_sum"), seed=0, num_records=5)

    @pytest.mark.parametrize(
        "options", ['{"nope": 1}', '{"min_terms": 5, "max_terms": 2}', '{"seed": 1}']
    )
    def test_options_that_do_not_fit_are_named(self, options):
        with pytest.raises(ValueError, match=r"data\.reasoning_gym\.options .* do not fit"):
            ReasoningProblems(make_task(options=options), seed=0, num_records=5)

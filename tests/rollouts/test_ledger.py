import json

import hypothesis
import pytest
from hypothesis import strategies as st

from pipeline_rl_jax.rollouts.ledger import PromptLedger
from tests.fakes.stages import NumberedPrompts


def take(ledger: PromptLedger, count: int) -> list[int]:
    return [ledger.next().prompt_id for _ in range(count)]


def resume(ledger: PromptLedger, count: int | None = None) -> PromptLedger:
    """A new ledger over the same data, from a snapshot that went through a file."""
    resumed = PromptLedger(NumberedPrompts(count))
    resumed.restore(json.loads(json.dumps(ledger.snapshot())))
    return resumed


def test_prompts_in_use_are_handed_out_again_and_finished_ones_are_not():
    ledger = PromptLedger(NumberedPrompts())
    assert take(ledger, 5) == [0, 1, 2, 3, 4]
    for prompt_id in (0, 1, 3):
        ledger.finish(prompt_id)
    assert ledger.snapshot() == {"stream": {"next": 2}, "finished": [3]}
    assert take(resume(ledger), 4) == [2, 4, 5, 6]


def test_the_oldest_that_finishes_frees_the_cursor_and_all_finished_after_it():
    ledger = PromptLedger(NumberedPrompts())
    take(ledger, 4)
    for prompt_id in (3, 1, 2):
        ledger.finish(prompt_id)
    assert ledger.snapshot()["stream"] == {"next": 0}
    ledger.finish(0)
    assert ledger.snapshot() == {"stream": {"next": 4}, "finished": []}
    assert ledger.num_unfinished == 0


def test_a_second_resume_still_knows_what_the_first_run_had_finished():
    ledger = PromptLedger(NumberedPrompts())
    take(ledger, 6)
    for prompt_id in (2, 4, 5):
        ledger.finish(prompt_id)
    once = resume(ledger)
    assert take(once, 1) == [0]
    twice = resume(once)  # before the first run's 2, 4, 5 have come by again
    assert take(twice, 4) == [0, 1, 3, 6]
    thrice = resume(twice)  # after they have
    assert take(thrice, 5) == [0, 1, 3, 6, 7]


def test_what_has_come_by_again_is_forgotten():
    ledger = PromptLedger(NumberedPrompts())
    take(ledger, 3)
    for prompt_id in (1, 2):
        ledger.finish(prompt_id)
    resumed = resume(ledger)
    assert take(resumed, 2) == [0, 3]
    resumed.finish(0)
    assert resumed.snapshot() == {"stream": {"next": 3}, "finished": []}


def test_the_end_of_the_data_is_none_again_and_again():
    ledger = PromptLedger(NumberedPrompts(2))
    take(ledger, 2)
    assert ledger.next() is None
    assert ledger.next() is None
    ledger.finish(1)
    resumed = resume(ledger, 2)
    assert take(resumed, 1) == [0]
    assert resumed.next() is None


def test_errors():
    ledger = PromptLedger(NumberedPrompts())
    take(ledger, 2)
    with pytest.raises(ValueError, match=r"prompt_id \(7\) is not being used"):
        ledger.finish(7)
    ledger.finish(1)
    with pytest.raises(ValueError, match=r"prompt_id \(1\) is not being used"):
        ledger.finish(1)
    with pytest.raises(RuntimeError, match="before its first prompt"):
        ledger.restore({"stream": {"next": 0}, "finished": []})


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.data())
def test_over_any_number_of_resumes_each_prompt_finishes_exactly_once(data):
    count, finished = 12, []
    ledger = PromptLedger(NumberedPrompts(count))
    for _ in range(data.draw(st.integers(0, 4))):
        used = take(ledger, data.draw(st.integers(0, 5))) if len(finished) + 5 <= count else []
        for prompt_id in data.draw(st.permutations(used)):
            if data.draw(st.booleans()):
                ledger.finish(prompt_id)
                finished.append(prompt_id)
        ledger = resume(ledger, count)
    while (prompt := ledger.next()) is not None:
        ledger.finish(prompt.prompt_id)
        finished.append(prompt.prompt_id)
    assert sorted(finished) == list(range(count))

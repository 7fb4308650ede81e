import pytest

from pipeline_rl_jax.data.formats import (
    IncompleteRecordError,
    RecordMapping,
    choose_format,
    field_at,
    read_problem,
)

AUTO = RecordMapping(format="auto")
GSM8K = {"question": "6 * 12?", "answer": "It is 72.\n#### 72"}
MATH = {"problem": "1/3?", "solution": r"$\boxed{\frac{1}{3}}$"}
ORZ = [{"from": "human", "value": "n?"}, {"from": "assistant", "ground_truth": {"value": "n = 4"}}]
DAPO = {
    "data_source": "own",
    "prompt": [{"content": "n?", "role": "user"}],
    "reward_model": {"ground_truth": "34", "style": "rule"},
}
SVAMP = {"Body": "I had 3 cups", "Question": "How many?", "Answer": 3.0}


def read(record, mapping=AUTO):
    return read_problem(record, choose_format(record, mapping), task="t")


@pytest.mark.parametrize(
    ("record", "name", "problem", "answer"),
    [
        (GSM8K, "gsm8k", "6 * 12?", "72"),
        (MATH, "math", "1/3?", r"\frac{1}{3}"),
        (MATH | {"answer": "0.5"}, "math", "1/3?", "0.5"),
        (MATH | {"answer": 204, "question": "1/3?"}, "math", "1/3?", "204"),
        (ORZ, "orz", "n?", "n = 4"),
        ({"0": ORZ[0], "1": ORZ[1]}, "orz", "n?", "n = 4"),
        (DAPO, "dapo", "n?", "34"),
        (SVAMP, "svamp", "I had 3 cups. How many?", "3"),
    ],
)
def test_known_layouts_are_recognised(record, name, problem, answer):
    assert choose_format(record, AUTO).name == name
    result = read(record)
    assert (result.problem, result.answer, result.task) == (problem, answer, "t")


@pytest.mark.parametrize("prompt", [5, None, "n?", {"role": "user"}])
def test_a_prompt_that_is_no_list_of_messages(prompt):
    with pytest.raises(ValueError, match="the prompt is not a list of messages but of kind"):
        read(DAPO | {"prompt": prompt})


def test_identifying_fields_are_kept():
    result = read(MATH | {"level": "Level 5", "unique_id": "a/7", "other": 1})
    assert result.metadata == {"level": "Level 5", "unique_id": "a/7"}


def test_mapped_fields_descend_and_count():
    record = {"prompt": [{"content": "  2 + 2?\n"}], "gold": {"value": -4}}
    mapping = RecordMapping(
        format="mapped", problem_field="prompt.0.content", answer_field="gold.value"
    )
    assert (read(record, mapping).problem, read(record, mapping).answer) == ("2 + 2?", "-4")


def test_auto_falls_back_to_the_mapped_fields():
    mapping = RecordMapping(format="auto", problem_field="input", answer_field="target")
    assert read({"input": "p", "target": "a"}, mapping).answer == "a"
    assert choose_format(GSM8K, mapping).name == "gsm8k"


@pytest.mark.parametrize("name", ["mapped", "auto"])
def test_a_prompt_needs_no_answer_where_nobody_compares_one(name):
    mapping = RecordMapping(format=name, problem_field="prompt", needs_answer=False)
    problem = read({"prompt": " Write a poem. ", "id": 3}, mapping)
    assert (problem.problem, problem.answer, problem.metadata) == ("Write a poem.", "", {"id": 3})
    with pytest.raises(IncompleteRecordError, match="the problem is empty"):
        read({"prompt": " "}, mapping)
    with pytest.raises(ValueError, match="fit none"):
        read({"prompt": "p"}, RecordMapping(format=name, problem_field="prompt"))
    # A field that is named must hold something.
    with pytest.raises(IncompleteRecordError, match="the answer is empty"):
        read(
            {"prompt": "p", "gold": ""},
            RecordMapping(
                format="mapped", problem_field="prompt", answer_field="gold", needs_answer=False
            ),
        )


def test_unknown_fields_are_named_with_the_settings_to_set():
    with pytest.raises(
        ValueError, match=r"'input', 'target' fit none of gsm8k.*data\.format=mapped"
    ):
        choose_format({"input": "p", "target": "a"}, AUTO)
    with pytest.raises(ValueError, match="records of kind str fit none"):
        choose_format("text", AUTO)
    with pytest.raises(ValueError, match="fit none"):  # multiple choice: no number after ####
        choose_format({"question": "p", "answer": 2}, AUTO)


def test_a_named_format_is_not_guessed():
    named = RecordMapping(format="gsm8k")
    with pytest.raises(ValueError, match="no 'answer' among the fields 'problem', 'solution'"):
        read(MATH, named)
    with pytest.raises(ValueError, match="lacks '####'"):
        read({"question": "p", "answer": "72"}, named)


@pytest.mark.parametrize(
    ("value", "text"), [(145.0, "145"), (1.5, "1.5"), (-3, "-3"), (" x ", "x"), (0.0, "0")]
)
def test_numbers_become_text(value, text):
    assert read(SVAMP | {"Answer": value}).answer == text


@pytest.mark.parametrize("value", [True, ["3"], {"a": 1}])
def test_other_values_are_errors(value):
    with pytest.raises(ValueError, match="the answer must be text or a number, not"):
        read(SVAMP | {"Answer": value})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (GSM8K | {"question": " \n"}, "the problem is empty"),
        (GSM8K | {"answer": "It is.\n####  "}, "the answer is empty"),
        (MATH | {"answer": None}, "the answer is null"),
        (MATH | {"solution": r"$\boxed{}$"}, "the answer is empty"),
        (MATH | {"solution": "none"}, "has no .boxed"),
    ],
)
def test_incomplete_records_have_an_error_of_their_own(record, message):
    with pytest.raises(IncompleteRecordError, match=message + r".*data\.incomplete=drop"):
        read(record)


def test_half_a_surrogate_pair_is_an_error():
    with pytest.raises(ValueError, match="surrogate"):
        read(GSM8K | {"question": "\ud83d"})


def test_a_prompt_of_several_messages_says_how_to_map_it():
    messages = [{"content": "s", "role": "system"}, {"content": "n?", "role": "user"}]
    with pytest.raises(ValueError, match=r"the roles \['system', 'user'\].*data\.problem_field"):
        read(DAPO | {"prompt": messages})


def test_field_at_names_what_is_missing():
    with pytest.raises(ValueError, match=r"field 'a\.c': no 'c' among the fields 'b'"):
        field_at({"a": {"b": 1}}, "a.c")
    with pytest.raises(ValueError, match=r"field 'a\.2': no '2' in a list of 1"):
        field_at({"a": [1]}, "a.2")
    with pytest.raises(ValueError, match="records of kind int"):
        field_at({"a": 1}, "a.b")

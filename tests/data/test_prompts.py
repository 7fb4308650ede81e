import pytest
import tokenizers
from tokenizers import processors

from pipeline_rl_jax.data.problems import Problem
from pipeline_rl_jax.data.prompts import PromptWriter, fitting_prompts, parse_example
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from tests.fakes.settings import make_settings
from tests.fakes.tiny_tokenizer import (
    ASSISTANT_ID,
    END_ID,
    EOS_ID,
    USER_ID,
    write_tiny_tokenizer,
)

PROBLEM = Problem(problem=r"Is {x} in \frac{1}{2}?", answer="no", task="t", metadata={"level": 1})


@pytest.fixture
def directory(tmp_path):
    return write_tiny_tokenizer(tmp_path / "model")


def make_writer(directory, max_prompt_tokens=1024, **data):
    settings = make_settings(data=data, generation={"max_prompt_tokens": max_prompt_tokens})
    return PromptWriter(settings, load_tokenizer(directory))


def test_plain(directory):
    writer = make_writer(directory, prompt_format="Q: {problem}\nIn \\boxed{{}}. A:")
    prompt = writer.write(PROBLEM, prompt_id=12)
    assert prompt.text == "Q: Is {x} in \\frac{1}{2}?\nIn \\boxed{}. A:"
    assert bytes(prompt.token_ids.tolist()).decode() == prompt.text
    assert (prompt.prompt_id, prompt.answer, prompt.task) == (12, "no", "t")
    assert prompt.metadata == {"level": 1}


def test_few_shot(directory):
    writer = make_writer(
        directory,
        template="few_shot",
        prompt_format="Q: {problem}\nA:",
        few_shot_examples=("1 + 1? ||| 2", "{y}?|||3"),
    )
    assert writer.text("5?") == "Q: 1 + 1?\nA: 2\n\nQ: {y}?\nA: 3\n\nQ: 5?\nA:"


def test_few_shot_format_that_ends_in_white_space(directory):
    writer = make_writer(
        directory,
        template="few_shot",
        prompt_format="{problem}\n",
        few_shot_examples=("a ||| b",),
    )
    assert writer.text("c") == "a\nb\n\nc\n"


def test_chat(directory):
    writer = make_writer(directory, template="chat")
    prompt = writer.write(Problem(problem="hi", answer="1"), prompt_id=0)
    assert prompt.token_ids.tolist() == [USER_ID, *b"hi", END_ID, ASSISTANT_ID]
    assert prompt.text == "<|user|>hi<|end|><|assistant|>"


def test_chat_with_system_prompt_and_examples_as_turns(directory):
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    writer = make_writer(
        directory, template="chat", system_prompt="be brief", few_shot_examples=("a ||| b",)
    )
    assert writer.text("c") == "[system:be brief][user:a][assistant:b][user:c]"


def test_the_token_that_begins_sequences_comes_once(directory):
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS_ID)]
    )
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("<eos>{{ messages[0].content }}")
    problem = Problem(problem="hi", answer="1")
    expected = [EOS_ID, *b"hi"]
    for data in (
        {"template": "plain", "prompt_format": "{problem}"},
        {"template": "plain", "prompt_format": "<eos>{problem}"},
        {"template": "chat"},
    ):
        prompt = make_writer(directory, **data).write(problem, prompt_id=0)
        assert prompt.token_ids.tolist() == expected
        assert prompt.text == "<eos>hi"


def test_length_limit_is_inclusive(directory):
    writer = make_writer(directory, max_prompt_tokens=4, prompt_format="{problem}")
    fitting, long = (Problem(problem=text, answer="1") for text in ("1234", "12345"))
    assert writer.fits(writer.write(fitting, prompt_id=0))
    assert not writer.fits(writer.write(long, prompt_id=0))
    assert writer.surely_fits(fitting)
    assert not writer.surely_fits(long)


def test_fitting_prompts(directory):
    writer = make_writer(directory, max_prompt_tokens=2, prompt_format="{problem}")
    problems = [Problem(problem=text, answer="1") for text in ("a", "long", "b")]
    kept = fitting_prompts(writer, problems, first_id=100, drop=True)
    assert [(prompt.prompt_id, prompt.text) for prompt in kept] == [(100, "a"), (102, "b")]
    with pytest.raises(
        ValueError,
        match=r"max_prompt_tokens \(2\) is less than the 4 tokens.*'long'.*too_long=drop",
    ):
        fitting_prompts(writer, problems, first_id=0, drop=False)
    with pytest.raises(ValueError, match="less than every one of 1 prompts needs"):
        fitting_prompts(writer, problems[1:2], first_id=0, drop=True)
    assert fitting_prompts(writer, [], first_id=0, drop=False) == []


def test_examples_are_split_once():
    assert parse_example(" a ||| b ||| c ") == ("a", "b ||| c")
    with pytest.raises(ValueError, match=r"data\.few_shot_examples \('a'\)"):
        parse_example("a")

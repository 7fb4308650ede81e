from pathlib import Path

import pytest

from pipeline_rl_jax.data.chat_template import ChatTemplate, find_template_source

HERE = Path("model")


def render(source, messages=(), **tokens):
    return ChatTemplate(source, tokens, origin=HERE).render(messages)


def test_messages_and_special_tokens_reach_the_template():
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}go{% endif %}"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert render(source, messages, bos_token="<s>") == "<s>system=s;user=u;go"


def test_blocks_leave_no_blank_lines():
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n") == "x\n"


def test_loop_controls_and_plain_json():
    assert (
        render("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{{ {'a': '<ü>'} | tojson }}") == '{"a": "<ü>"}'


def test_no_date_is_written_that_would_change_on_resume():
    source = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}fixed{% endif %}"
    assert render(source) == "fixed"


def test_a_template_may_refuse_messages():
    source = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"model refuses the roles \['system'\]: no system role"):
        render(source, [{"role": "system", "content": ""}])


def test_a_template_cannot_change_or_reach_out():
    with pytest.raises(ValueError, match="refuses"):
        render("{{ messages.append(1) }}", [{"role": "user", "content": ""}])
    with pytest.raises(ValueError, match="refuses"):
        render("{{ messages.__class__.__mro__ }}")


def test_a_template_that_does_not_parse_is_named():
    with pytest.raises(ValueError, match="the chat template of model does not parse"):
        render("{% for %}")


def test_where_the_template_is_found(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_template_source(tmp_path, [{}]) is None
    assert find_template_source(tmp_path, [{}, {"chat_template": "C"}]) == "C"
    assert find_template_source(tmp_path, [{"chat_template": named}]) == "D"
    assert find_template_source(tmp_path, [{"chat_template": named[:1]}]) is None
    (tmp_path / "chat_template.jinja").write_text("J")
    assert find_template_source(tmp_path, [{"chat_template": "C"}]) == "J"

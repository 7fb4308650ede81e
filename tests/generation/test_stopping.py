"""Stop tokens and stop strings."""

from pipeline_rl_jax.generation.stopping import StopRules
from pipeline_rl_jax.records import StopReason
from tests.fakes.tiny_tokenizer import END_ID, EOS_ID


def test_every_eos_id_of_generation_config_ends_a_completion(tokenizer):
    rules = StopRules(tokenizer, stop_strings=(), ignore_eos=False)
    assert set(rules.token_ids) == {EOS_ID, END_ID}
    assert rules.reason(END_ID) is StopReason.EOS
    assert rules.watcher() is None


def test_ignore_eos_leaves_stop_strings(tokenizer):
    rules = StopRules(tokenizer, stop_strings=("\n",), ignore_eos=True)
    assert rules.token_ids == (10,)
    assert rules.reason(10) is StopReason.STOP_STRING


def test_stop_strings_over_several_tokens_and_chunks(tokenizer):
    watcher = StopRules(tokenizer, stop_strings=("</a>", "END"), ignore_eos=False).watcher()
    assert watcher.extend(list(b"x </")) is None
    assert watcher.extend(list(b"a> more")) == 2
    watcher = StopRules(tokenizer, stop_strings=("é!",), ignore_eos=False).watcher()
    assert watcher.extend(list("é".encode())) is None
    assert watcher.extend(list(b"!?")) == 1

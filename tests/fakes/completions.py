"""Completions for rewards: only their text, gold answer and length matter."""

import numpy as np

from pipeline_rl_jax.records import Completion, Prompt, StopReason


def make_text_completion(text: str, *, answer: str, num_tokens: int = 4) -> Completion:
    prompt = Prompt(prompt_id=0, token_ids=np.zeros(2, np.int32), text="Question:", answer=answer)
    return Completion(
        prompt=prompt,
        sample_index=0,
        token_ids=np.zeros(num_tokens, np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
        stop_reason=StopReason.EOS,
        text=text,
    )

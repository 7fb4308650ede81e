"""In-flight updates at work: completions of 128 tokens, most written by several versions.

    python launch/train.py --config=configs/inflight_demo.py --workdir=runs/inflight_demo

`ignore_eos` makes every completion 128 tokens long, so an update always finds every slot half
written and no slot is ever drained. The summary shows mixed versions in most completions, and the
timeline (`trace.json`, for ui.perfetto.dev) decode chunks without a gap around optimizer steps. It
demonstrates the flow of weights; it is not meant to learn.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.data.prompt_format = "Question: {problem} Think step by step.\nAnswer:"
    config.generation.slots = 6
    config.generation.min_slots = 6
    config.generation.tokens_per_chunk = 8
    config.generation.max_prompt_tokens = 32
    config.generation.max_new_tokens = 128
    config.generation.prefill_buckets = (32,)
    config.generation.min_cache_tokens = 160
    config.generation.stop_strings = ()
    config.generation.ignore_eos = True
    config.algorithm.group_size = 2
    config.trainer.batch_rollouts = 4
    config.trainer.tokens_per_row = 320
    config.trainer.rows_per_micro_batch = 2
    config.schedule.num_steps = 16
    config.schedule.max_lag = 8
    config.schedule.stream_groups = 8  # the decode loop may run ahead: it never has to wait
    config.evaluation.at_start = False
    config.evaluation.at_end = False
    config.telemetry.timeline = True
    return config

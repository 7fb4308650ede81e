"""Reward functions that a user might name by import path, the broken ones included."""

import asyncio
import threading
import time

NOT_A_FUNCTION = 3


def half_for_short(completion):
    return 0.5 if completion.num_tokens < 10 else 0.0


async def text_length(completion):
    await asyncio.sleep(0.001)
    return len(completion.text)


def thread_is_main(completion):
    return float(threading.current_thread() is threading.main_thread())


def unreachable_service(completion):
    raise ConnectionError("reward service at port 1 refused")


def times_out_itself(completion):
    raise TimeoutError("my own request timed out")


def not_a_number(completion):
    return float("nan")


def no_number_at_all(completion):
    return "1.0"


def hangs_for_a_second(completion):
    time.sleep(1.0)
    return 1.0


async def hangs_async(completion):
    await asyncio.sleep(60.0)
    return 1.0


async def blocks_its_loop(completion):
    time.sleep(1.0)  # a user's mistake, on purpose
    return 1.0


async def exits_async(completion):
    raise SystemExit(3)


def share_of_vowels(completion):
    return (
        sum(letter in "aeiouAEIOU" for letter in completion.text) / 8 + completion.num_tokens / 80
    )


def even_token_sum(completion):
    return float(completion.token_ids.sum() % 2 == 0)

"""Chunks are handed over without waiting, and every completion is answered from its own text."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from pipeline_rl_jax.rewards.stream_readers import StreamReaders
from pipeline_rl_jax.rewards.streaming import StreamCounts
from tests.fakes.tiny_reward_model import cut, make_completion


class Texts:
    """`StreamedTexts` that reads off the sum of a text's tokens; `gate` holds its device."""

    def __init__(self, *, fails: bool = False) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fails = fails
        self.texts: dict = {}
        self.calls: list = []
        self.cancelled: list = []

    @property
    def counts(self):
        return StreamCounts(finished=sum(name == "finish" for name, _ in self.calls))

    @property
    def num_live(self):
        return len(self.texts)

    @property
    def live_keys(self):
        return list(self.texts)

    def extend(self, chunks):
        self.gate.wait(20)
        if self.fails:
            raise RuntimeError("device lost")
        self.calls.append(("extend", len(chunks)))
        for chunk in chunks:
            text = self.texts.setdefault((chunk.prompt.prompt_id, chunk.sample_index), [])
            assert len(text) == chunk.start
            text += chunk.token_ids.tolist()

    def finish_all(self, keys):
        if keys:
            self.calls.append(("finish", len(keys)))
        return [np.float32(sum(self.texts.pop(key))) for key in keys]

    def cancel(self, key):
        self.cancelled.append(key)
        self.texts.pop(key, None)


def run(scenario, **texts: Texts):
    async def main():
        readers = StreamReaders(texts)
        try:
            return await asyncio.wait_for(scenario(readers), timeout=30)
        finally:
            await readers.close()
            await readers.close()

    return asyncio.run(main())


def test_every_model_reads_every_chunk_and_answers_by_its_name():
    completions = [make_completion(i, prompt_tokens=2, num_tokens=5 + i) for i in range(3)]
    first, second = Texts(), Texts()

    async def scenario(readers):
        for sizes in zip(*(cut(c, [2, 1, c.num_tokens - 3]) for c in completions), strict=True):
            readers.read(sizes)
        return await asyncio.gather(*map(readers.finish, completions))

    for found, completion in zip(run(scenario, a=first, b=second), completions, strict=True):
        total = float(completion.token_ids.sum())
        assert found == {"a": total, "b": total}
    assert first.num_live == second.num_live == 0


def test_reading_holds_nobody_up_and_what_piled_up_is_read_together():
    completion, texts = make_completion(0, prompt_tokens=2, num_tokens=6), Texts()
    texts.gate.clear()

    async def scenario(readers):
        started = time.monotonic()
        first, *rest = cut(completion, [1] * 6)
        readers.read([first])
        while readers._readers["a"]._requests.qsize():  # taken up by the thread, which hangs now
            await asyncio.sleep(0.001)
        for chunk in rest:
            readers.read([chunk])
        score = asyncio.ensure_future(readers.finish(completion))
        await asyncio.sleep(0.01)
        assert not score.done()
        assert readers.counts["a"].finished == 0  # asked without waiting for the device
        assert time.monotonic() - started < 10
        texts.gate.set()
        return await score

    assert run(scenario, a=texts) == {"a": float(completion.token_ids.sum())}
    assert texts.calls == [("extend", 1), ("extend", 5), ("finish", 1)]


def test_an_error_ends_every_wait_and_is_raised_at_the_next_chunk():
    completion = make_completion(0, prompt_tokens=2, num_tokens=4)

    async def scenario(readers):
        readers.read(cut(completion, [4]))
        with pytest.raises(RuntimeError, match="device lost"):
            await readers.finish(completion)
        with pytest.raises(RuntimeError, match="device lost"):
            readers.read(cut(completion, [4]))

    async def waiting_again(readers):
        readers.read(cut(completion, [4]))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="device lost"):
                await readers.finish(completion)

    run(scenario, a=Texts(fails=True), b=Texts())
    run(waiting_again, a=Texts(fails=True))


def test_who_is_forgotten_or_no_longer_waited_for_gives_its_row_up():
    completions = [make_completion(i, prompt_tokens=2, num_tokens=4) for i in range(4)]
    texts = Texts()

    async def scenario(readers):
        texts.gate.clear()
        readers.read([cut(each, [4])[0] for each in completions])
        readers.forget(completions[0])
        while readers._readers["a"]._requests.qsize() > 1:  # its thread hangs in the chunks
            await asyncio.sleep(0.001)
        waiting = asyncio.ensure_future(readers.finish(completions[1]))
        await asyncio.sleep(0)
        waiting.cancel()
        texts.gate.set()
        assert await readers.finish(completions[2]) == {"a": float(completions[2].token_ids.sum())}
        readers.forget_all()

    run(scenario, a=texts)
    assert texts.num_live == 0
    assert {(0, 0), (1, 0), (3, 0)} <= {*texts.cancelled}


def test_forgetting_everything_spares_what_comes_after_it():
    """The evaluation at the end of a run follows at once."""
    old, new = (make_completion(i, prompt_tokens=2, num_tokens=4) for i in (0, 7))
    texts = Texts()
    texts.gate.clear()

    async def scenario(readers):
        readers.read(cut(old, [4]))
        readers.forget_all()
        score = asyncio.ensure_future(readers.read_whole("a", new, (-1, 0)))
        await asyncio.sleep(0)
        texts.gate.set()
        return await score

    assert run(scenario, a=texts) == float(new.token_ids.sum())
    assert texts.num_live == 0


def test_without_models_nothing_happens():
    completion = make_completion(0, prompt_tokens=2, num_tokens=4)

    async def scenario(readers):
        readers.read(cut(completion, [4]))
        readers.forget(completion)
        readers.forget_all()
        return await readers.finish(completion), readers.counts, readers.num_live

    assert run(scenario) == ({}, {}, 0)

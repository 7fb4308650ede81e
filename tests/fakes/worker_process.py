"""What a worker process of someone else's pool does; on its own because spawn imports it."""

import asyncio
import multiprocessing

from pipeline_rl_jax.rewards.verifier_pool import Outcome, VerifierPool


def ask_in_this_process(gold: str, *answers: str) -> tuple[list[Outcome], bool]:
    """What the verifier says to each answer, and whether this is a worker process at all."""
    pool = VerifierPool(num_workers=1, deadline_seconds=20.0, kinds={"equal"})

    async def ask() -> list[Outcome]:
        return await asyncio.gather(*(pool.ask("equal", gold, answer) for answer in answers))

    outcomes = asyncio.run(ask())
    pool.close()
    return outcomes, multiprocessing.parent_process() is not None

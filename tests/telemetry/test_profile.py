import asyncio

import jax
import jax.numpy as jnp

from pipeline_rl_jax.settings import ProfileSettings
from pipeline_rl_jax.telemetry.profile import ProfileWindow
from pipeline_rl_jax.telemetry.spans import span


def profile_of(directory) -> bytes:
    """Bytes of the only profile where TensorBoard's plugin looks for it; names stand in plain."""
    (path,) = directory.glob("plugins/profile/*/*.xplane.pb")
    return path.read_bytes()


def run_steps(window, steps):
    double = jax.jit(lambda x: x * 2)
    for step in steps:
        window.before_step(step)
        with span("decode_chunk"), span(f"at_step_{step}"):
            double(jnp.ones(4)).block_until_ready()
        window.after_step(step)


def test_profile_holds_the_spans_of_the_chosen_steps(tmp_path):
    window = ProfileWindow(ProfileSettings(start_step=2, num_steps=2), tmp_path)
    run_steps(window, range(1, 6))
    window.close()
    profile = profile_of(tmp_path)
    assert b"decode_chunk" in profile
    assert [step for step in range(1, 6) if b"at_step_%d" % step in profile] == [2, 3]


def test_spans_of_coroutines_that_take_turns(tmp_path):
    async def score(name, seconds):
        with span(name, track="rewards"):
            await asyncio.sleep(seconds)

    async def score_two():
        await asyncio.gather(score("reward_of_one", 0.02), score("reward_of_another", 0.01))

    window = ProfileWindow(ProfileSettings(start_step=1, num_steps=1), tmp_path)
    window.before_step(1)
    asyncio.run(score_two())
    window.after_step(1)
    profile = profile_of(tmp_path)
    assert b"reward_of_one" in profile
    assert b"reward_of_another" in profile


def test_a_run_that_ends_inside_the_window_writes_what_it_has(tmp_path):
    window = ProfileWindow(ProfileSettings(start_step=2, num_steps=100), tmp_path)
    run_steps(window, [2, 3])
    assert not list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    window.close()
    window.close()
    assert b"at_step_3" in profile_of(tmp_path)


def test_off_writes_nothing(tmp_path):
    window = ProfileWindow(ProfileSettings(start_step=1, num_steps=0), tmp_path)
    run_steps(window, [1, 2])
    window.close()
    assert list(tmp_path.iterdir()) == []

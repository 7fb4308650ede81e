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
        with span("wait_for_rollouts", track="trainer"):
            pass
        window.after_step(step)


def test_profile_holds_the_spans_of_the_chosen_steps(tmp_path):
    window = ProfileWindow(ProfileSettings(start_step=2, num_steps=2), tmp_path)
    run_steps(window, range(1, 6))
    window.close()
    profile = profile_of(tmp_path)
    assert b"decode_chunk" in profile
    assert [step for step in range(1, 6) if b"at_step_%d" % step in profile] == [2, 3]
    assert b"wait_for_rollouts" not in profile  # it crosses awaits: host totals only


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

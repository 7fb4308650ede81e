import jax
import jax.numpy as jnp
import numpy as np

from pipeline_rl_jax.telemetry.process import CompilationCounter, resident_bytes


def test_memory_is_what_is_resident_now():
    before = resident_bytes()
    block = np.ones(64 * 2**20, np.uint8)
    assert resident_bytes() - before > 48 * 2**20
    del block
    assert resident_bytes() - before < 16 * 2**20


def test_a_program_counts_once_per_shape_until_closed():
    counter = CompilationCounter()
    double = jax.jit(lambda x: x * 2)
    three, four, five = jnp.zeros(3), jnp.zeros(4), jnp.zeros(5)
    start = counter.count
    double(three)
    assert counter.count == start + 1
    double(three)
    assert counter.count == start + 1
    double(four)
    assert counter.count == start + 2
    counter.close()
    double(five)
    assert counter.count == start + 2

"""The measured peak of a device: how fast it multiplies large matrices.

Owns the measurement only. A data sheet's peak is never reached; utilisation against this one says
what is left to gain.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

_REPEATS = 5


def measure_peak_flops(device: jax.Device, dtype: str) -> float:
    """FLOP/s of the best of five products of square matrices, on one device at rest.

    4096 wide on an accelerator, 1024 on a CPU. Virtual CPU devices share the host: its peak is that
    of one of them, not of their sum.
    """
    width = 1024 if device.platform == "cpu" else 4096
    matrix = jax.device_put(jnp.ones((width, width), dtype), device)
    product = jax.jit(lambda a, b: a @ b)
    product(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * width**3 / min(seconds)

"""Eight CPU devices for every test, set before JAX starts.

`JAX_PLATFORMS=cuda pytest -m gpu` runs the tests that need an accelerator on one.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The tests compile hundreds of small programs and run each a few times: what counts is the time of
# the compiler. Both flags together; the second one alone makes it slower.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
# No test may look for a model or a data set on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)

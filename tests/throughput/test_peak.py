import jax

from pipeline_rl_jax.throughput.peak import measure_peak_flops


def test_the_peak_of_a_cpu_is_of_a_cpus_order():
    assert 1e8 < measure_peak_flops(jax.devices()[0], "float32") < 1e14

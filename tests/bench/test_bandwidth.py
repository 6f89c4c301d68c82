import jax.numpy as jnp
import numpy as np

from kvjax.bench import bandwidth
from kvjax.bench.bandwidth import Bandwidth, probes
from kvjax.bench.timing import Timing


def test_probes_do_what_their_bytes_say():
    found = probes(4096)
    assert {name: probe.nbytes for name, probe in found.items()} == {
        "copy": 8192,
        "update": 8192,
        "read": 4096,
    }
    np.testing.assert_array_equal(found["copy"].step(), np.ones(1024))
    np.testing.assert_array_equal(found["update"].step(), -np.ones(1024))
    np.testing.assert_array_equal(found["update"].step(), np.ones(1024))
    assert found["read"].step() == 1024


def test_copy_reads_its_source_and_writes_into_the_donated_array():
    source, target = jnp.arange(1024.0), jnp.zeros(1024)
    memory = bandwidth._copy.lower(source, target).compile().memory_analysis()
    assert memory.alias_size_in_bytes == target.nbytes
    assert memory.temp_size_in_bytes == 0
    np.testing.assert_array_equal(bandwidth._copy(source, target), np.arange(1024.0))
    assert target.is_deleted()


def test_yardstick_is_the_fastest():
    seconds = {"copy": 4.0, "update": 1.0, "read": 1.0}
    timings = {name: Timing(1, (s, s, s)) for name, s in seconds.items()}
    measured = Bandwidth.of(probes(4096), timings)
    assert measured.bytes_per_second == {"copy": 2048, "update": 8192, "read": 4096}
    assert measured.yardstick == "update"
    assert measured.best == 8192

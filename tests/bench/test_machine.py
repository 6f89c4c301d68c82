import os

import jax

from kvjax.bench import machine


def test_describes_this_machine():
    found = machine.describe()
    assert found["backend"] == jax.default_backend()
    assert found["threads"] == len(os.sched_getaffinity(0))
    assert found["versions"]["jax"] == jax.__version__
    assert found["cpu"]


def test_free_memory_is_less_than_all_of_it():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.free_bytes() < total

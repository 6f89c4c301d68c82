import threading

import pytest

from kvjax.bench.gpu.ahead import compile_all


def test_builds_run_at_once_and_failures_wait():
    together, told = threading.Barrier(2, timeout=20), []

    def build():
        return together.wait()

    def broken():
        raise ValueError("does not compile")

    builds = {"a": build, "b": build, "c": broken}
    found = compile_all(builds, 2, lambda name, seconds: told.append((name, seconds >= 0)))
    assert {found["a"].result(), found["b"].result()} == {0, 1}
    assert sorted(told) == [("a", True), ("b", True), ("c", True)]
    with pytest.raises(ValueError, match="does not compile"):
        found["c"].result()


def test_nothing_begins_after_the_deadline():
    found = compile_all({"a": lambda: 1}, 1, lambda *_: None, deadline=0.0)
    with pytest.raises(TimeoutError):
        found["a"].result()

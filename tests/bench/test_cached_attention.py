import jax
import numpy as np
import pytest

from kvjax.bench import machine
from kvjax.bench.cached_attention import CacheCase, Steps, measure
from kvjax.ops import attend

pytestmark = pytest.mark.usefixtures("quick")
CASE = CacheCase(2, 4, 2, 8, length=1300, codec="int8")
CASES = {
    "int8": CASE,
    "pages": CacheCase(2, 4, 2, 8, length=20, layout="paged:4", codec="f32"),
    "ring": CacheCase(2, 4, 2, 8, length=20, layout="auto", codec="f32", window=5),
    "sinks": CacheCase(2, 4, 2, 8, length=20, layout="sinks:2+5", codec="bf16"),
    "kivi": CacheCase(2, 4, 2, 32, length=200, codec="kivi2"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_attends_to_its_own_token_and_all_before_it(case):
    steps = Steps(case)
    held = case.filled()
    assert held.n.tolist() == [case.length - 1] * 2
    new = held.append(steps._new, np.ones(2, np.int32))
    q, at = steps._q, np.full((2, 1), case.length - 1)
    want, _ = jax.jit(lambda cache: attend(q, cache, at, window=case.window))(new)
    for _ in range(3):  # every call is the same
        np.testing.assert_allclose(steps.step(), want, rtol=1e-5, atol=1e-6)
    assert steps(2) > 0


def test_bytes_are_those_of_the_arrays():
    (row,) = measure([CASE], rounds=3)["rows"]
    codes, scales = 2 * 2 * 1300 * 2 * 8, 2 * 2 * 1300 * 2 * 4
    assert row["bytes_per_step"] == codes + scales
    assert row["flop_per_step"] == 2 * (2 * 4 * 1300 * (8 + 8))
    leaves = CASE.filled().leaves.values()
    assert sum(leaf.nbytes for leaf in leaves) == row["bytes_per_step"]


def test_a_ring_reads_its_window():
    (row,) = measure([CASES["ring"]], rounds=3)["rows"]
    assert row["bytes_per_step"] == 2 * 5 * 2 * 2 * 8 * 4
    assert (row["layout"], row["window"], row["length"]) == ("auto", 5, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "pile"}, "layout: got 'pile'"),
        ({"codec": "int3"}, "codec"),
        ({"length": 0}, "length"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CacheCase(
            **{"batch": 1, "query_heads": 2, "kv_heads": 1, "head_dim": 8, "length": 8} | changes
        )


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda: 10_000)
    with pytest.raises(ValueError, match="the caches of all cases"):
        measure([CASE])

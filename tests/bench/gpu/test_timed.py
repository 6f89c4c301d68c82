"""Checks and timings on a CPU, where plain JAX or a stand-in takes the kernel's place."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from kvjax.bench import bandwidth, timing
from kvjax.bench.gpu import checks, peers, presets, timed
from kvjax.bench.gpu.ahead import compile_all
from kvjax.bench.gpu.chained import Chain
from kvjax.bench.gpu.presets import Point
from kvjax.bench.gpu.shape import DecodeShape, attend
from kvjax.bench.gpu.timed import Bench
from kvjax.bench.peers import AbsentError
from kvjax.sizing import CHIPS

SHAPE = DecodeShape(2, 4, 2, 64, 128)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(timed, "ROUNDS", 3)
    return Bench(bandwidth.probes(2**16)["copy"], CHIPS["H200"], tiny=True)


def test_a_row_says_what_was_measured(bench):
    (row,) = bench.rows(Point("sweep", SHAPE))
    nbytes, flop = 2 * 2 * 128 * 2 * 64 * 2, 2 * 4 * 128 * 2 * 2 * 64
    seconds = row["median_seconds"]
    assert (row["contender"], row["sweep"], row["kernel"]) == ("kvjax", "sweep", "bf16")
    assert (row["bytes_per_step"], row["flop_per_step"]) == (nbytes, flop)
    assert row["bytes_per_second"] == pytest.approx(nbytes / seconds)
    assert row["flop_per_second"] == pytest.approx(flop / seconds)
    assert row["share_of_matrix_peak"] == pytest.approx(flop / seconds / 989.5e12)
    assert row["share_of_copy"] == pytest.approx(nbytes / seconds / row["copy_bytes_per_second"])
    assert row["floor_seconds"] == pytest.approx(nbytes / row["copy_bytes_per_second"])
    assert row["share_of_floor"] == pytest.approx(row["floor_seconds"] / seconds)
    assert (row["copies"], row["working_set_bytes"]) == (2, 2 * nbytes)
    assert row["calls_per_sample"] % Chain(2, 1).calls == 0
    assert row["agrees"]
    assert 0 < row["difference"] < 0.012


def test_the_matrix_peak_may_be_the_floor(bench):
    slow = replace(CHIPS["H200"], bf16_flops=1e6)
    (row,) = replace(bench, chip=slow).rows(Point("sweep", SHAPE))
    assert row["floor_seconds"] == pytest.approx(row["flop_per_step"] / 1e6)


def test_a_wrong_contender_is_timed_and_does_not_agree(bench, monkeypatch):
    def wrong(shape, q, operands, **how):
        return attend(shape, q, operands | {"v": operands["k"]}, implementation="xla")

    monkeypatch.setattr(peers, "attend", wrong)
    (row,) = bench.rows(Point("sweep", SHAPE))
    assert row["median_seconds"] > 0
    assert not row["agrees"]


def test_who_cannot_take_part_says_why(bench, monkeypatch):
    def missing(name):
        raise AbsentError(f"there is no {name}")

    monkeypatch.setattr(peers, "_import", missing)
    names = ("kvjax", "kvjax xla", "jax triton", "torch sdpa")
    rows = {row["contender"]: row for row in bench.rows(Point("peers", SHAPE, names))}
    assert set(rows) == set(names)
    assert rows["jax triton"]["error"] == "AbsentError: it needs a GPU"
    assert rows["torch sdpa"]["error"] == "AbsentError: there is no torch"
    assert rows["kvjax xla"]["agrees"]
    codes = replace(SHAPE, codec="int8", scales="head")
    (row,) = bench.rows(Point("peers", codes, ("jax triton",)))
    assert "full 16-bit caches" in row["error"]


def test_what_does_not_fit_is_skipped(bench, monkeypatch):
    monkeypatch.setattr(timed.machine, "free_bytes", lambda: 10**6)
    (row,) = bench.rows(Point("sweep", SHAPE))
    assert row["error"] == "skipped: it needs 1 GB, and 0 GB are free"
    assert row["label"] == "B2 N4 K2 H64 128 bf16"


def test_what_was_compiled_ahead_is_used(bench, monkeypatch):
    point = Point("sweep", SHAPE)
    ((key, build),) = bench.builds([point]).items()
    assert key == (point, "kvjax")
    bench.ahead.update(compile_all({key: build}, 1, lambda *_: None))
    monkeypatch.setattr(Bench, "_compiled", lambda *_: pytest.fail("compiled twice"))
    (row,) = bench.rows(point)
    assert row["agrees"]
    assert not bench.ahead


def test_chains_follow_the_chip(bench):
    point = Point("sweep", SHAPE)
    full = replace(bench, tiny=False)
    assert bench.chain(point) == Chain(2, 1)
    assert full.chain(point).copies == 32
    assert full.chain(Point("sweep", presets.ARTICLE)) == Chain()
    assert full.chain(Point("sweep", presets.ARTICLE, copies=2)).copies == 2
    assert bench.chain(Point("sweep", presets.ARTICLE)) == Chain()


@pytest.fixture
def held(monkeypatch):
    """Hold a function of (shape, q, operands) in the kernel's place."""

    def run(function, shape):
        monkeypatch.setattr(checks, "KERNEL", "xla")
        monkeypatch.setattr(checks, "attend", function)
        return checks.check(shape, checks.compiled(shape))

    return run


def test_what_is_right_passes(held):
    found = held(attend, replace(SHAPE, length=(1, 100)))
    assert found["passed"]
    assert found["steady"]
    assert found["tolerance"] == {"out": 0.012, "lse": 0.005}


def test_what_is_stale_or_nan_or_unsteady_fails(held):
    shape = replace(SHAPE, length=(1, 100))
    first = {}

    def stale(shape, q, operands, **how):
        """The answer to whatever was asked first."""
        how.pop("interpret")
        out, lse = attend(shape, q, operands, **how)
        return jax.pure_callback(lambda *x: first.setdefault("x", x), (out, lse), out, lse)

    def nan(shape, q, operands, **how):
        out, lse = attend(shape, q, operands, **how)
        return out.at[0, 0, 0].set(jnp.nan), lse

    count = iter(range(10**6))

    def unsteady(shape, q, operands, **how):
        out, lse = attend(shape, q, operands, **how)
        off = jax.pure_callback(lambda: jnp.float32(next(count) % 2), jnp.float32(0))
        return out, lse + off * 1e-4

    def raced(shape, q, operands, **how):
        out, lse = attend(shape, q, operands, **how)
        jax.debug.callback(lambda: print("RACE DETECTED\n  write of x"), ordered=True)
        return out, lse

    found = held(stale, shape)
    assert not found["passed"]
    assert found["steady"]
    found = held(nan, shape)
    assert not found["passed"]
    assert found["difference"]["out"] is None
    found = held(unsteady, shape)
    assert not found["passed"]
    assert not found["steady"]
    assert found["difference"]["lse"] < found["tolerance"]["lse"]
    found = held(raced, shape)
    assert not found["passed"]
    assert found["steady"]
    assert found["raced"]

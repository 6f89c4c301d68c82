from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kvjax.bench.gpu import presets
from kvjax.bench.gpu.peers import KERNEL
from kvjax.bench.gpu.presets import Point
from kvjax.bench.gpu.shape import DecodeShape, attend, operands, queries
from kvjax.ops import decode
from kvjax.ops.devices import Gpu
from kvjax.sizing import CHIPS

POINTS = presets.points()
CHECKS = presets.checks(1024)


@pytest.fixture
def refusal(monkeypatch):
    """Why the public function would not run the kernel for a shape on an H200; None if it would."""

    def run(q, stored, *_):
        out = jnp.zeros((*q.shape[:2], stored.value_dim))
        return out, out[..., 0]

    monkeypatch.setattr(decode, "current_gpu", lambda: Gpu((9, 0), 132))
    monkeypatch.setitem(decode.IMPLEMENTATIONS, KERNEL, run)

    def tried(shape: DecodeShape) -> str | None:
        q, given = (jax.eval_shape(partial(make, shape)) for make in (queries, operands))
        try:
            jax.eval_shape(partial(attend, shape, implementation=KERNEL), q, given)
        except ValueError as error:
            return str(error)
        return None

    return tried


def test_names_are_unique():
    names = [point.name for point in POINTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("slots", [192, 1024])
def test_the_kernel_serves_all_that_is_checked(slots, refusal):
    refused = {name: refusal(shape) for name, shape in presets.checks(slots).items()}
    assert {name: why for name, why in refused.items() if why is not None} == {}


def test_the_kernel_serves_all_that_is_timed_and_all_of_it_fits(refusal):
    for point in POINTS:
        assert refusal(point.shape) is None, point.name
        assert refusal(presets.quick(point).shape) is None, point.name
        together = point.shape.allocated_bytes * 2
        assert together < 0.7 * CHIPS["H200"].memory_bytes, point.name


def test_whatever_is_timed_is_checked():
    """Otherwise no check could make its timings invalid."""
    checked = {presets.kernel(shape) for shape in CHECKS.values()}
    assert {presets.kernel(point.shape) for point in POINTS} <= checked


def test_sweeps_are_those_that_were_asked_for():
    def of(sweep):
        return [point.shape for point in POINTS if point.sweep == sweep]

    assert [shape.group for shape in of("article")] == [1, 2, 4, 8]
    assert {(s.batch, s.length, s.query_heads, s.key_dim) for s in of("article")} == {
        (32, 16384, 8, 128)
    }
    assert {(s.batch, s.length) for s in of("article, long")} == {(64, 65536)}
    assert [shape.key_dim for shape in of("head dims")] == [64, 96, 128, 192, 256]
    assert {shape.batch for shape in of("batch")} == {1, 8, 128, 512}
    assert {(s.batch, s.length) for s in of("one row")} == {(1, 131072)}
    assert {s.page_size for s in of("pages")} == {16, 64, 128}
    assert {(s.query_heads, s.key_dim, s.rope_dim) for s in of("latents")} == {
        (128, 512, 64),
        (16, 512, 64),
    }
    assert {(s.codec, s.scales) for s in of("codecs")} == {
        (codec, scales) for codec in ("fp8_e4m3", "int8") for scales in ("head", "token")
    }
    base = presets.ARTICLE.bytes_per_step
    fewer = sorted(base / shape.bytes_per_step for shape in of("fewer bytes"))
    assert fewer == [1, 2, 2, 2, 4, 4, 8, 8]


def test_quick_points_are_tiny_and_of_the_same_kind():
    for point in POINTS:
        small = presets.quick(point).shape
        assert small.allocated_bytes < 4 * 10**6
        assert presets.kernel(small) == presets.kernel(point.shape)
        assert small.group == point.shape.group
        if point.shape.window:
            assert small.window * 64 == point.shape.window


def test_labels():
    shape = DecodeShape(2, 8, 1, 64, (3, 200), value_dim=128, codec="int8", scales="token")
    label = presets.label(replace(shape, page_size=16, window=5, soft_cap=2.0, sinks=True))
    assert label == (
        "B2 N8 K1 H64/128 ragged/208 int8 token scales pages 16 window 5 cap 2.0 sinks"
    )
    point = Point("sweep", replace(presets.DEEPSEEK, query="f16"), copies=2)
    assert point.name == "sweep: B32 N128 K1 L512+64 8192 bf16 q f16 x2"
    assert presets.kernel(point.shape) == "bf16, latents"
    assert presets.kernel(replace(shape, page_size=16)) == "int8, token scales, pages"

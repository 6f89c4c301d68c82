"""Faults planted in the kernel: each is seen, by the race detector or by wrong numbers.

What is stored and not fenced before a product reads it is not: that is read off the traced kernel
here, and off the machine code by `scripts/check_kernels.py`. Nor are queries that are not waited
for, since keys come after them; and barriers that count other arrivals hang.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kernels.conftest import accuracy
from kernels.planting import (
    api,
    changed,
    handed_on_unfenced,
    known_barriers,
    next_page,
    raised_what_it_must,
    without_wait,
)
from kvjax.bench.gpu.shape import DecodeShape, attend, operands, queries
from kvjax.kernels.mosaic_gpu import attending, copying, decode, settings
from kvjax.ops import decode as ops_decode
from kvjax.ops import mosaic
from kvjax.ops.devices import Gpu

HOPPER, BLACKWELL = (9, 0), (10, 0)
# Six tiles, in three stages at most: each stage is used again.
SHAPE = DecodeShape(1, 4, 1, key_dim=256, length=(380,), page_size=16)
IN_A_WINDOW = replace(SHAPE, window=70)
CODED = DecodeShape(1, 4, 1, key_dim=64, length=(640,), codec="int8", scales="token")


def released_early(name, before):
    """A stage is released when the products of `before` begin, and not again after them."""

    def plant(monkeypatch) -> None:
        is_named = known_barriers(monkeypatch, decode)
        release, step = attending._release, getattr(attending, before)

        def late(settings, free):
            if not is_named(free, name):
                release(settings, free)

        def early(settings, scratch, *rest):
            stage = rest[0] if before == "_products" else rest[1]
            release(settings, getattr(scratch, name).at[stage])
            return step(settings, scratch, *rest)

        monkeypatch.setattr(attending, "_release", late)
        monkeypatch.setattr(attending, before, early)

    return plant


def one_slot_more(old):
    return lambda settings, span, *rest: old(
        settings, span._replace(n=span.n + 1, oldest=span.oldest - 1), *rest
    )


def keys_as_values(old):
    def copy(settings, inputs, *rest):
        return old(settings, inputs._replace(v=inputs.k[0]), *rest)

    return copy


def binary_lse(old):
    def write(settings, seen, scratch):
        old(settings, seen, scratch)
        scratch.lse[...] = scratch.lse[...] * attending.LOG2_E

    return write


def heads_in_reverse(old):
    def write(settings, seen, scratch):
        old(settings, seen, scratch)
        scratch.out[...] = scratch.out[...][jnp.array([1, 0, 2, 3, 4, 5, 6, 7])]

    return write


def zeros(old):
    return lambda *args: tuple(jnp.zeros_like(x) for x in old(*args))


def dead_values(old):
    """Values as they lie, dead ones among them."""
    return lambda settings, span, first, columns: (
        old(settings, span, first, columns) | (columns != settings.plan.heads)
    )


def without_first_tile(old):
    return lambda self, *args: (span := old(self, *args))._replace(first=span.first + 1)


def unscaled(old):
    return lambda *args: None


unwaited = partial(without_wait, blocks=decode)
MUTANTS: dict[str, tuple[DecodeShape, tuple[int, int], Callable]] = {
    "keys overwritten unread": (SHAPE, HOPPER, unwaited(copying, "k_free")),
    "values overwritten unread": (SHAPE, HOPPER, unwaited(copying, "v_free")),
    "keys read before they are there": (
        SHAPE,
        BLACKWELL,
        unwaited(attending, "k_full"),
    ),
    "values read before they are there": (
        SHAPE,
        BLACKWELL,
        unwaited(attending, "v_full"),
    ),
    "keys released before they are read": (
        SHAPE,
        BLACKWELL,
        released_early("k_free", "_products"),
    ),
    "values released before they are read": (
        SHAPE,
        BLACKWELL,
        released_early("v_free", "_values"),
    ),
    "another page": (SHAPE, HOPPER, changed(copying, "_page", next_page)),
    "a slot more at both ends": (IN_A_WINDOW, HOPPER, changed(attending, "_live", one_slot_more)),
    "values made of keys": (SHAPE, HOPPER, changed(decode, "copy_tiles", keys_as_values)),
    "lse in powers of 2": (SHAPE, HOPPER, changed(decode, "write", binary_lse)),
    "all zero": (SHAPE, HOPPER, changed(mosaic, "merge_splits", zeros)),
    "a tile skipped": (SHAPE, HOPPER, changed(settings.Settings, "span", without_first_tile)),
    "dead values": (SHAPE, HOPPER, changed(attending, "_live", dead_values)),
    "codes without their scales": (CODED, HOPPER, changed(attending, "token_scales", unscaled)),
}


@pytest.mark.parametrize(
    ("shape", "capability"),
    [(SHAPE, HOPPER), (SHAPE, BLACKWELL), (IN_A_WINDOW, HOPPER), (CODED, HOPPER)],
    ids=str,
)
def test_without_a_planted_fault_it_is_attention(shape, capability, simulate):
    assert simulate(shape, capability, 1).within(accuracy(shape))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_seen(name, simulate, monkeypatch):
    shape, capability, plant = MUTANTS[name]
    plant(monkeypatch)
    assert is_seen(shape, capability, simulate)


def is_seen(shape, capability, simulate) -> bool:
    """Whether the simulation or its numbers say that something is wrong."""
    try:
        found = simulate(shape, capability, 1)
    except Exception as error:  # of a callback, whose own type is lost
        if raised_what_it_must(error):
            return True
        raise
    return not found.within(accuracy(shape))


@pytest.mark.parametrize("shape", [SHAPE, CODED], ids=["numbers", "codes"])
def test_what_is_stored_is_fenced_before_it_is_handed_on(shape, monkeypatch):
    """In the kernel as it is compiled, not as it is simulated."""
    monkeypatch.setattr(ops_decode, "current_gpu", lambda: Gpu(HOPPER, 4))

    def traced():
        call = jax.make_jaxpr(lambda q, arrays: attend(shape, q, arrays))
        return call(queries(shape), operands(shape)).jaxpr

    assert handed_on_unfenced(traced()) == (0, False)
    monkeypatch.setattr(attending, "plgpu", api(commit_smem=lambda: None))
    assert handed_on_unfenced(traced())[0]

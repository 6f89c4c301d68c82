"""Random inputs, the one comparison that all tests of attention use, and a counter of work."""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops import attend, xla


class Inputs(NamedTuple):
    """q (B, N, H) or (B, T, N, H), k (B, K, S, H), v (B, K, S, HV)."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


@pytest.fixture(scope="session")
def draw() -> Callable[..., Inputs]:
    """Normal inputs of `heads` = (N, K) and `dims` = (H, HV); tokens=None is one query a row."""

    def inputs(batch, heads, slots, dims, *, tokens=None, dtype=jnp.float32, seed=0) -> Inputs:
        rng = np.random.default_rng(seed)
        (n, k), (h, hv) = heads, dims
        q_shape = (batch, n, h) if tokens is None else (batch, tokens, n, h)
        shapes = (q_shape, (batch, k, slots, h), (batch, k, slots, hv))
        return Inputs(*(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes))

    return inputs


def tolerance(dtype) -> float:
    """Of results of order 1. Half precision is rounded to twice, the weights and the result; all
    else is float32 or wider, where a score of H products loses some ulp.
    """
    info = jnp.finfo(dtype)
    return float(info.eps) * (1 if info.bits == 16 else 16)


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    """Raise AssertionError unless (out, lse) agree, each to the accuracy of its dtype.

    An lse of None in `want` is not compared.
    """

    def compare(got, want) -> None:
        for a, b in zip(got, want, strict=True):
            if b is not None:
                limit = tolerance(a.dtype)
                a, b = (np.asarray(x, np.float64) for x in (a, b))
                np.testing.assert_allclose(a, b, rtol=limit, atol=limit)

    return compare


@pytest.fixture
def small_blocks(monkeypatch) -> Iterator[None]:
    """Blocks of 8 slots and tiles of 8 queries, so that small inputs have many of them."""
    monkeypatch.setattr(xla, "DECODE_BLOCK", 8)
    monkeypatch.setattr(xla, "QUERY_TILE", 8)
    monkeypatch.setattr(xla, "KEY_TILE", 8)
    forget()
    yield
    forget()


@pytest.fixture
def updates(monkeypatch) -> Iterator[list[int]]:
    """Gets one entry more for each block that is computed, not merely compiled."""
    done: list[int] = []

    def counted(*args):
        jax.debug.callback(lambda: done.append(1))
        return update(*args)

    update = xla.update
    for module in (xla, sys.modules[attend.__module__]):
        monkeypatch.setattr(module, "update", counted)
    forget()
    yield done
    forget()


def forget() -> None:
    """Drop what was compiled with other constants."""
    xla.decode.clear_cache()
    xla.prefill.clear_cache()

"""Holding the kernels against float64 on the device at hand."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from kvjax.bench.gpu.oracle import Difference, difference, tolerance
from kvjax.bench.gpu.peers import KERNEL
from kvjax.bench.gpu.shape import DecodeShape, attend, compile_operands, operands, queries

# What was left in memory by one set of queries cannot pass as the answer to another.
QUERY_SETS = 3
# Calls that must agree with the last to the bit: what races shows here.
REPEATS = 10
RACE = "RACE DETECTED"
# Arrays of NaN, of each size that a call allocates, that are freed before it.
POISONED_ARRAYS = 8


def compiled(shape: DecodeShape, *, interpret: bool = False) -> jax.stages.Compiled:
    """The kernel for that shape, from q and operands to output and LSE."""
    compile_operands(shape, poisoned=True)
    step = partial(attend, shape, return_lse=True, implementation=KERNEL, interpret=interpret)
    q = jax.eval_shape(partial(queries, shape))
    return jax.jit(step).lower(q, jax.eval_shape(partial(operands, shape))).compile()


def check(
    shape: DecodeShape, call: jax.stages.Compiled, *, interpret: bool = False
) -> dict[str, Any]:
    """Compare every output and LSE of a call with float64.

    Args:
      shape: of the call; all arrays hold NaN wherever nothing is live.
      call: as `compiled` gives it.
      interpret: whether it is simulated: one set of queries then, and no repetitions.

    Returns:
      Whether it passed, and how, as plain data; a difference of NaN is None.
    """
    given = operands(shape, poisoned=True)
    worst, said = np.zeros(2), io.StringIO()
    for seed in range(1 if interpret else QUERY_SETS):
        q = queries(shape, seed)
        _poison_memory(call)
        with redirect_stdout(said):  # where jax 0.11 tells of races that it found
            out, lse = jax.block_until_ready(call(q, given))
        worst = np.maximum(worst, difference(shape, q, given, out, lse))
    repeats = 0 if interpret else REPEATS
    steady = all(_same(call(q, given), (out, lse)) for _ in range(repeats))
    found, most = Difference(*worst.tolist()), tolerance(shape)
    return {
        "passed": found.within(most) and steady and RACE not in said.getvalue(),
        "difference": plain(found),
        "tolerance": plain(most),
        "steady": steady,
        "raced": RACE in said.getvalue(),
    }


def plain(found: Difference) -> dict[str, float | None]:
    """As JSON has it."""
    return {name: x if math.isfinite(x) else None for name, x in found._asdict().items()}


def _poison_memory(call: jax.stages.Compiled) -> None:
    """Leave NaN where the outputs and temporaries of a call are likely to be put."""
    memory: Any = call.memory_analysis()
    outputs = (math.prod(x.shape) * x.dtype.itemsize for x in call.out_info)
    sizes = {memory.temp_size_in_bytes, *outputs}
    held = [
        jax.device_put(np.full(-(-size // 4), np.nan, np.float32))
        for size in sizes - {0}
        for _ in range(POISONED_ARRAYS)
    ]
    jax.block_until_ready(held)


def _same(some: tuple[Array, ...], others: tuple[Array, ...]) -> bool:
    """Equal to the bit."""
    pairs = zip(some, others, strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)

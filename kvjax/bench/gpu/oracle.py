"""What decode attention must give, in float64 by numpy: the judge of every implementation.

One KV head of one row at a time, from the arrays that the implementation got, so that large shapes
can be looked at in a few places. It shares no code with any implementation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.bench.gpu.shape import DecodeShape, Operands

# The largest difference, as a share of a head's largest output, by the dtype that weights and
# outputs are rounded to; of LSEs; and what an approximate tanh adds to both beneath a soft cap.
TOLERANCES = {"f32": 1e-4, "bf16": 1.2e-2, "f16": 2e-3}
LSE_TOLERANCE = 5e-3
CAP_TOLERANCE = 4e-2

# What is as small is copied to the host whole, which compiles nothing.
SMALL_BYTES = 2**25


class Difference(NamedTuple):
    """The largest differences from float64, NaN where something was NaN.

    Attributes:
      out: as a share of the largest output of the same head.
      lse: of LSEs; 0 where there were none.
    """

    out: float
    lse: float

    def within(self, tolerance: Difference) -> bool:
        """Whether neither is larger; NaN is."""
        return self.out <= tolerance.out and self.lse <= tolerance.lse


def tolerance(shape: DecodeShape) -> Difference:
    """The most that an implementation may differ."""
    cap = CAP_TOLERANCE if shape.soft_cap else 0.0
    # Integer codes are multiplied in bf16, whatever the queries are.
    rounded = "bf16" if shape.codec == "int8" else shape.query
    return Difference(TOLERANCES[rounded] + cap, LSE_TOLERANCE + cap)


def difference(
    shape: DecodeShape,
    q: Array,
    operands: Operands,
    out: Any,
    lse: Any = None,
    heads: Iterable[tuple[int, int]] | None = None,
) -> Difference:
    """How far outputs (B, N, HV) and LSEs (B, N) are from what they must be.

    Args:
      shape, q, operands: of the call.
      out, lse: what it gave.
      heads: pairs of row and KV head to look at; None for all.
    """
    if heads is None:
        heads = np.ndindex(shape.batch, shape.kv_heads)
    out = np.asarray(out, np.float64)
    lses = None if lse is None else np.asarray(lse, np.float64)
    worst = np.zeros(2)
    for row, head in heads:
        mine = np.s_[row, head * shape.group : (head + 1) * shape.group]
        wanted, wanted_lse = expected(shape, q, operands, row, head)
        largest = np.abs(wanted).max(-1, keepdims=True)
        errors = [np.abs(out[mine] - wanted) / np.where(largest > 0, largest, 1)]
        if lses is not None:
            with np.errstate(invalid="ignore"):
                far = np.abs(lses[mine] - wanted_lse)
            errors.append(np.where(lses[mine] == wanted_lse, 0, far))  # infinities among them
        for i, error in enumerate(errors):
            worst[i] = np.maximum(worst[i], error.max())  # of NaN, NaN
    return Difference(*worst.tolist())


def expected(
    shape: DecodeShape, q: Array, operands: Operands, row: int, head: int
) -> tuple[np.ndarray, np.ndarray]:
    """Output (G, HV) and LSE (G,) of one KV head of one row."""
    heads = slice(head * shape.group, (head + 1) * shape.group)
    query = np.asarray(q)[row, heads].astype(np.float64)
    if shape.rope_dim:
        rope = np.asarray(operands["q_rope"])[row].astype(np.float64)
        query = np.concatenate([query, rope], -1)
    k, v = _records(shape, operands, row, head)
    scores = query @ k.T * shape.scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
    if shape.sinks:
        sinks = np.asarray(operands["sink_logits"])[heads, None]
        scores, v = np.append(scores, sinks, 1), np.append(v, np.zeros((1, v.shape[1])), 0)
    if not scores.size:
        return np.zeros((shape.group, v.shape[1])), np.full(shape.group, -np.inf)
    most = scores.max(1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(1, keepdims=True)
    return weights @ v / total, (most + np.log(total))[:, 0]


def _records(
    shape: DecodeShape, operands: Operands, row: int, head: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys (n, H) and values (n, HV) that a KV head of a row sees."""
    stop = int(shape.live[row, head])
    start = 0 if shape.window is None else max(0, stop - shape.window)

    def read(name: str) -> np.ndarray:
        array, table = operands[name], operands.get("page_table")
        rows = np.array([row])
        if shape.page_size is not None:
            rows = np.asarray(table)[row][: -(-stop // shape.page_size)]
        found = _fetch(array, rows, None if shape.rope_dim else head)
        return found.reshape(-1, *found.shape[2:])[start:stop].astype(np.float64)

    def scale(name: str) -> np.ndarray:
        if shape.scales == "token":
            return read(name)[:, None]
        return np.broadcast_to(np.asarray(operands[name], np.float64), (shape.kv_heads,))[head]

    if shape.rope_dim:
        latent = read("latent")
        return np.concatenate([latent, read("k_rope")], -1), latent
    if shape.scales is None:
        return read("k"), read("v")
    return read("k") * scale("k_scale"), read("v") * scale("v_scale")


def _fetch(array: Array, rows: np.ndarray, head: int | None) -> np.ndarray:
    """Rows or pages of an array, of one head where it has heads, on the host."""
    if array.nbytes > SMALL_BYTES:
        return np.asarray(_pick(array, jnp.asarray(rows), head))
    found = np.asarray(array)[rows]
    return found if head is None else found[:, head]


@jax.jit
def _pick(array: Array, rows: Array, head: int | None) -> Array:
    return array[rows] if head is None else array[rows, head]

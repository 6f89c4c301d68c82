"""The work of one decode step: bytes moved, products, and softmax's exponentials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.sizing.checks import amount
from kvjax.sizing.codecs import CodecSpec
from kvjax.sizing.roofline import SOFTMAX_FLOP, Work
from kvjax.sizing.weights import Precision

if TYPE_CHECKING:
    from kvjax.sizing.spec import ModelSpec


def step_work(
    spec: ModelSpec,
    tokens: int,
    batch: int,
    *,
    weight_bytes: float | None,
    codec: CodecSpec,
    precision: Precision,
    products: str,
    tp: int,
    source_tokens: int,
) -> Work:
    """What one of `tp` shards does in a step; see `ModelSpec.decode_floor` for the arguments."""
    if products not in ("matrix", "vector"):
        raise ValueError(f"products: got {products!r}; accepted: 'matrix', 'vector'")
    cache = spec.cache_bytes(tokens, batch, codec, tp=tp, source_tokens=source_tokens)
    states = batch * sum(
        state.nbytes(codec.activation_itemsize, tp)
        for layer in spec.layers
        for state in layer.states
    )
    read, multiplied = _weights(spec, batch, weight_bytes, precision)
    attention = batch * spec.attention_flop(tokens, source_tokens, tp)
    scores = batch * spec.scores(tokens, source_tokens, tp)
    on_matrix_units = products == "matrix"
    return Work(
        memory_bytes=read / tp + cache.read_per_step + 2 * states,
        matrix_flop=2 * batch * multiplied / tp + (attention if on_matrix_units else 0),
        vector_flop=SOFTMAX_FLOP * scores + (0 if on_matrix_units else attention),
        exponentials=scores,
    )


def _weights(
    spec: ModelSpec, batch: int, nbytes: float | None, precision: Precision
) -> tuple[float, float]:
    """Bytes of weights that a step reads, and weights that each of its tokens multiplies."""
    if nbytes is None:
        return spec.weight_bytes_read(batch, precision), spec.parameters_active
    return amount("weight_bytes", nbytes), nbytes / precision.itemsize

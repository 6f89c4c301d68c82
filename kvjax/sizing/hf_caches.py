"""What the caches of transformers 5 hold: its DynamicCache and its StaticCache.

They differ from this library's in three ways. A DynamicCache keeps W - 1 keys of a window between
two steps, since the newest comes with the step. Some models cache something else than their
architecture needs (`LayerSpec.hf`). And the pools of compressed attention are kept as states.
Measured against transformers 5.24.
"""

from kvjax.sizing.codecs import CodecSpec
from kvjax.sizing.layer import LayerSpec

DEFINITIONS = ("hf-dynamic", "hf-static")


def held(
    layer: LayerSpec, tokens: int, codec: CodecSpec, definition: str, tp: int = 1
) -> tuple[int, int]:
    """Bytes of keys and values, and bytes of states, of one sequence in one layer.

    Raises:
        ValueError: the codec is not one in which transformers keeps K and V as they are; or the
            layer is one that its StaticCache cannot hold.
    """
    if codec.name not in ("f32", "bf16", "f16"):
        raise ValueError(
            f"codec: got {codec.name!r} with definition {definition!r}; accepted: f32, bf16, f16"
        )
    layer = layer.hf or layer
    compressed = any(pool.ratio > 1 for pool in layer.pools)
    if compressed and definition == "hf-static":
        raise ValueError(
            f"definition: got {definition!r}; accepted for layers with compressed pools: kvjax, "
            "hf-dynamic, since transformers has no StaticCache for them"
        )
    rows = _rows(layer, tokens, definition)
    records = sum(codec.live(rows, part) for part in layer.parts(tp))
    index = rows * layer.index_dim * (layer.index_itemsize or codec.itemsize)
    return records + index, _states(layer, tokens, codec, tp)


def _rows(layer: LayerSpec, tokens: int, definition: str) -> int:
    span = layer.span
    if span is None:
        return tokens
    if definition == "hf-static":
        return min(tokens, span)
    # The slice [-W + 1:] that drops old keys keeps all of them for W = 1.
    return tokens if span == 1 else min(tokens, span - 1)


def _states(layer: LayerSpec, tokens: int, codec: CodecSpec, tp: int) -> int:
    itemsize = codec.activation_itemsize
    total = sum(state.nbytes(itemsize, tp) for state in layer.states)
    for pool in layer.pools:
        entries = pool.entries(tokens)
        total += entries * pool.width * itemsize
        total += pool.waiting_bytes(tokens % pool.ratio, itemsize)
        total += pool.previous_bytes(itemsize) if entries else 0
    return total

"""What a codec costs a model: layer by layer on exact inputs, and in its predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from kvjax.cache import Block, CodecChoice, LayerCache, LayoutChoice, PerLayer, Record
from kvjax.cache.bits import to_fp8
from kvjax.cache.codecs import StaticFp8
from kvjax.cache.scales import Scales, static_codec
from kvjax.engine.calibrate import check_batch
from kvjax.engine.score import score
from kvjax.nn import Attention, Decoder
from kvjax.nn.watch import Projections, attention_modules, projections
from kvjax.ops import attend


@dataclass(frozen=True)
class LayerError:
    """Relative errors of one layer whose inputs are exact: norm of the difference over norm.

    Attributes:
      layer: its index.
      codec: of its cache.
      key, value: of what the cache holds at the end of the text, decoded.
      output: of all heads' attention outputs, before they are projected.
      query: of queries rounded to 8 bits with `q_scale`; None without such scales.
      output_8bit_query: as `output`, with those queries.
    """

    layer: int
    codec: str
    key: float
    value: float
    output: float
    query: float | None
    output_8bit_query: float | None


@dataclass(frozen=True)
class CodecError:
    """What a cache in a codec changes, against one in f32 of the same layout.

    Attributes:
      codec: its name, or those of all layers.
      tokens: real tokens of the text.
      layers: those that keep keys and values of their own.
      kl: mean KL(f32 || this) of the next token's distribution, nats, after all tokens but each
        row's last; the errors of all layers and tokens compound as in generation.
      loss, f32_loss: mean cross entropy of the next token, nats, with either cache.
    """

    codec: str
    tokens: int
    layers: tuple[LayerError, ...]
    kl: float
    loss: float
    f32_loss: float

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return asdict(self)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Layer, codec and relative errors, as `COLUMNS` names them, for a table."""
        for layer in self.layers:
            errors = (layer.key, layer.value, layer.output, layer.query, layer.output_8bit_query)
            yield str(layer.layer), layer.codec, *("-" if x is None else f"{x:.2%}" for x in errors)


COLUMNS = ("codec", "keys", "values", "output", "8-bit q", "output, 8-bit q")


def codec_error(
    model: Decoder,
    tokens: ArrayLike,
    codec: PerLayer[CodecChoice],
    *,
    layout: PerLayer[LayoutChoice] = "dense",
    scales: Scales | None = None,
    count: ArrayLike | None = None,
) -> CodecError:
    """Measure a codec on texts, read token by token as in generation.

    Args:
      model: a decoder whose layers are `nn.Attention`.
      tokens: (B, T) integers, right-padded.
      codec, layout, scales: of the cache, as in `Decoder.init_cache`. Scales with `q_scale` also
        tell what queries in 8 bits would change.
      count: (B,), the real tokens of each row; None means all T. Padding counts for nothing.

    Raises:
      ValueError: for arguments that do not fit each other, or no row of two tokens.
    """
    ids, real = check_batch(model, tokens if count is None else (tokens, count))
    batch, length = ids.shape

    def cache(codec: PerLayer[CodecChoice], scales: Scales | None = None) -> Any:
        return model.init_cache(batch, length, layout, codec, scales=scales)

    modules = attention_modules(model)
    exact, coded = cache("f32"), cache(codec, scales)
    seen, layers = _projections(model, ids, real), []
    pairs = zip(exact.layers, coded.layers, strict=True)
    for i, pair in zip(model.config.cached, pairs, strict=True):
        module, eight_bits = modules[i], _eight_bits(scales, i)
        layers.append(_layer_error(i, module, seen[i], real, *pair, eight_bits))
    text: dict[str, Any] = {"tokens": jnp.asarray(ids), "count": jnp.asarray(real), "chunk": 1}
    reference, _ = score(model, cache=cache("f32"), **text)
    scores, _ = score(model, cache=cache(codec, scales), reference=reference, **text)
    names = ", ".join(dict.fromkeys(layer.codec for layer in layers))
    return CodecError(
        names, int(real.sum()), tuple(layers), scores.divergence, scores.loss, reference.loss
    )


_projections = jax.jit(projections)


@partial(jax.tree_util.register_dataclass, data_fields=("scale",), meta_fields=("codec",))
@dataclass(frozen=True)
class _EightBits:
    """How queries are rounded: to the codec's format, by scales (N,)."""

    codec: StaticFp8
    scale: Array

    def __call__(self, q: Array) -> Array:
        """q (..., N, H), stored in 8 bits and read back."""
        scale = self.scale[:, None]
        return (to_fp8(q / scale, self.codec.dtype).astype(jnp.float32) * scale).astype(q.dtype)


def _eight_bits(scales: Scales | None, layer: int) -> _EightBits | None:
    found = None if scales is None or layer >= len(scales.layers) else scales.layers[layer]
    if scales is None or found is None or found.q_scale is None:
        return None
    return _EightBits(static_codec(scales.codec), jnp.asarray(found.q_scale))


def _layer_error(
    i: int,
    module: Attention,
    seen: Projections,
    count: np.ndarray,
    exact: LayerCache,
    coded: LayerCache,
    eight_bits: _EightBits | None,
) -> LayerError:
    want, _ = _attend(module, seen, count, exact, None)
    got, held = _attend(module, seen, count, coded, None)
    key, value = _read_back(seen, held)
    tokens = np.arange(seen.q.shape[1]) < count[:, None]

    def error(found: Array, exact: Array) -> float:
        return _relative([(np.asarray(found)[tokens], np.asarray(exact)[tokens])])

    output, query, output_8bit_query = error(got, want), None, None
    if eight_bits is not None:
        query = error(eight_bits(seen.q), seen.q)
        output_8bit_query = error(_attend(module, seen, count, coded, eight_bits)[0], want)
    return LayerError(i, held.codec.name, key, value, output, query, output_8bit_query)


@jax.jit
def _attend(
    module: Attention,
    seen: Projections,
    count: Array,
    cache: LayerCache,
    eight_bits: _EightBits | None,
) -> tuple[Array, LayerCache]:
    """Append the tokens to an empty cache one by one, each attending it as decode does.

    Returns the heads' outputs (B, T, N, HV), and the cache.
    """
    rounded = (lambda q: q) if eight_bits is None else eight_bits

    def step(cache: LayerCache, t: Array) -> tuple[LayerCache, Array]:
        now = Projections(*(jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1) for x in seen))
        positions = jnp.where(t < count, t, -1)[:, None]
        record = Record(jnp.swapaxes(now.k, 1, 2), jnp.swapaxes(now.v, 1, 2))
        cache = cache.append(record, (t < count).astype(jnp.int32))
        settings = module.settings
        if cache.sight.reindexed:
            place = cache.sight.place(positions)
            settings["q_sinks"] = rounded(module.rotate(now.unrotated, place))
        out, _ = attend(rounded(now.q), cache, positions, **settings)
        return cache, out[:, 0]

    cache, out = jax.lax.scan(step, cache, jnp.arange(seen.q.shape[1], dtype=jnp.int32))
    return jnp.moveaxis(out, 0, 1), cache


@jax.jit
def _block(cache: LayerCache, i: Array) -> Block:
    return cache.block(i)


def _read_back(seen: Projections, cache: LayerCache) -> tuple[float, float]:
    """Errors of the keys and of the values that a cache holds."""
    keys: list[tuple[np.ndarray, np.ndarray]] = []
    values: list[tuple[np.ndarray, np.ndarray]] = []
    for i in range(int(cache.blocks())):
        block = _block(cache, jnp.int32(i))
        pos = np.broadcast_to(np.asarray(block.pos), block.k.shape[:3])
        row, head, slot = np.nonzero(pos >= 0)
        where = (row, pos[row, head, slot], head)
        for found, decoded, exact in ((keys, block.k, seen.k), (values, block.v, seen.v)):
            found.append((np.asarray(decoded)[row, head, slot], np.asarray(exact)[where]))
    return _relative(keys), _relative(values)


def _relative(pairs: list[tuple[Any, Any]]) -> float:
    """Frobenius norm of the differences over that of the second ones, in float64."""
    wide = [tuple(np.asarray(x, np.float64) for x in pair) for pair in pairs]
    error, size = (
        sum(float(np.sum(x**2)) for x in parts)
        for parts in ((a - b for a, b in wide), (b for _, b in wide))
    )
    return float(np.sqrt(error / size)) if size else float(np.sqrt(error))

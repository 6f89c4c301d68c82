"""What a checkpoint family declares: how its config.json makes a decoder, and its tensors' names.

One table of `Tensor` rows serves loading, saving and conversion. Parameters are in one canonical
form whatever the family: kernels are (in, out), head h takes columns h*H to (h+1)*H of a
projection's last axis, and a fused projection's last axis is [q | k | v].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from kvjax.nn import AttentionConfig, Decoder, DecoderConfig
from kvjax.nn.sharing import AnyAttentionConfig
from kvjax.sizing import ModelSpec

type Shape = tuple[int, ...]
type Region = tuple[Any, ...]  # an index of numpy's


class Layout(Protocol):
    """How a family stores one tensor, against the canonical form. All methods are inverse pairs."""

    def shape(self, shape: Shape) -> Shape:
        """Stored shape of a parameter of this canonical shape."""
        ...

    def read(self, stored: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        """Stored -> canonical; a view where it can be."""
        ...

    def write(self, parameter: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        """Canonical -> stored."""
        ...


class Same:
    """Stored as it is."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def read(self, stored: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        return stored

    def write(self, parameter: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        return parameter


class Transposed:
    """torch.nn.Linear stores (out, in)."""

    def shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def read(self, stored: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        return stored.T

    def write(self, parameter: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        return parameter.T


class GroupedByKVHead:
    """Fused q, k, v, (out, in), whose rows are [its queries; k; v] for one KV head after another.

    With as many KV heads as query heads this is GPT-NeoX's interleaving, [q; k; v] for each head.
    """

    def shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def read(self, stored: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        assert attention is not None  # the tensor is a layer's
        a, rest = attention, stored.shape[1:]
        group = a.query_heads // a.kv_heads
        blocks = stored.reshape(a.kv_heads, group + 2, a.key_dim, *rest)
        parts = (blocks[:, :group], blocks[:, group], blocks[:, group + 1])
        return np.concatenate([part.reshape(-1, *rest) for part in parts]).T

    def write(self, parameter: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        assert isinstance(attention, AttentionConfig)  # the tensor is a layer's
        a, rest = attention, parameter.shape[:-1]
        parts = np.split(parameter.T, np.cumsum(a.qkv_widths)[:2])
        blocks = [part.reshape(a.kv_heads, -1, a.key_dim, *rest) for part in parts]
        return np.concatenate(blocks, axis=1).reshape(-1, *rest)


class Interleaved:
    """The two halves of the last axis in turn, number by number: [a0, b0, a1, b1, ...]."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def read(self, stored: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        return np.concatenate([stored[..., 0::2], stored[..., 1::2]], axis=-1)

    def write(self, parameter: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        return np.stack(np.split(parameter, 2, axis=-1), axis=-1).reshape(parameter.shape)


class PairsInHeads:
    """(out, in), where each head's rows have the channels that RoPE turns together side by side.

    Scores do not depend on the order of channels that queries and keys have in common.
    """

    def shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def read(self, stored: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        assert attention is not None  # the tensor is a layer's
        heads = stored.T.reshape(*stored.shape[1:], -1, attention.key_dim)
        return INTERLEAVED.read(heads, attention).reshape(stored.T.shape)

    def write(self, parameter: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        assert attention is not None  # the tensor is a layer's
        heads = parameter.reshape(*parameter.shape[:-1], -1, attention.key_dim)
        return INTERLEAVED.write(heads, attention).reshape(parameter.shape).T


class EachTransposed:
    """A torch.nn.Linear for each expert, (E, out, in)."""

    def shape(self, shape: Shape) -> Shape:
        return (shape[0], shape[2], shape[1])

    def read(self, stored: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        return stored.swapaxes(1, 2)

    def write(self, parameter: np.ndarray, attention: AnyAttentionConfig | None) -> np.ndarray:
        return parameter.swapaxes(1, 2)


SAME, TRANSPOSED, GROUPED_BY_KV_HEAD = Same(), Transposed(), GroupedByKVHead()
INTERLEAVED, PAIRS_IN_HEADS, EACH_TRANSPOSED = Interleaved(), PairsInHeads(), EachTransposed()


@dataclass(frozen=True)
class Tensor:
    """A stored tensor's name, the parameter's path, and its layout; "{i}" stands for the layer.

    A parameter may be stored as several tensors, each of them a part of it: with "{e}" in the name,
    one for each entry e of the first axis (an expert); with `half`, the first (0) or the second (1)
    half of the last axis (the gate and the way up of a gated MLP).
    """

    name: str
    path: str
    layout: Layout = SAME
    half: int | None = None

    def parts(self, shape: Shape) -> Iterator[tuple[str, Region]]:
        """Names, and where in a parameter of this shape each of these tensors lies."""
        columns: Region = ()
        if self.half is not None:
            width = shape[-1] // 2
            columns = (..., slice(self.half * width, (self.half + 1) * width))
        if "{e}" not in self.name:
            yield self.name, columns
            return
        for expert in range(shape[0]):
            yield self.name.replace("{e}", str(expert)), (expert, *columns)


@dataclass(frozen=True)
class Family:
    """One model_type.

    Attributes:
      model_type: as config.json spells it.
      decoder: config.json and its spec -> the decoder's settings, its own fields checked.
      tensors: every tensor the family can have; a row applies where the decoder has its path.
      prefix: what names carry in checkpoints with an output head, and lack in those without.
      kv_heads_field: the config field that holds K, or None where the family cannot express it.
      ignored: patterns of stored names that carry no parameter (buffers of old versions).
      other_forms: rows that are read where a checkpoint has them in place of those of the same path
        in `tensors`, which are what is written.
    """

    model_type: str
    decoder: Callable[[dict, ModelSpec], DecoderConfig]
    tensors: tuple[Tensor, ...]
    prefix: str = "model."
    kv_heads_field: str | None = "num_key_value_heads"
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    other_forms: tuple[Tensor, ...] = ()


class Binding(NamedTuple):
    """One stored tensor of one checkpoint, resolved."""

    name: str
    path: str
    layout: Layout
    attention: AnyAttentionConfig | None
    shape: Shape  # as stored
    region: Region = ()  # of the parameter; () is all of it


def parameter_paths(model: Decoder) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> leaf, such as "layers.0.attention.q.kernel", in the order of the model's pytree."""
    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    return {path_name(keys): leaf for keys, leaf in leaves}


def path_name(keys: tuple) -> str:
    """A pytree key path as dotted names; the last key is the nnx.Param's own and left out."""
    return jax.tree_util.keystr(keys[:-1], simple=True, separator=".")


def abstract_decoder(config: DecoderConfig, dtype: DTypeLike = jnp.float32) -> Decoder:
    """The decoder with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))


def bind(family: Family, config: DecoderConfig) -> dict[str, Binding]:
    """Name -> where the tensor belongs, for every parameter of the decoder, as it is written."""
    return _bind_written(family, config, parameter_paths(abstract_decoder(config)))


def _bind_written(
    family: Family, config: DecoderConfig, parameters: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, Binding]:
    bindings = dict(_bind_rows(family.tensors, config, parameters))
    unnamed = parameters.keys() - {binding.path for binding in bindings.values()}
    if unnamed:
        raise LookupError(f"family {family.model_type} names no tensor for {sorted(unnamed)}")
    return bindings


def _bind_rows(
    rows: Iterable[Tensor], config: DecoderConfig, parameters: dict[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, Binding]]:
    for row in rows:
        layers = range(len(config.attention)) if "{i}" in row.path else (None,)
        for i in layers:
            path = row.path.replace("{i}", str(i))
            if path not in parameters:
                continue
            for part, region in row.parts(parameters[path].shape):
                name = part.replace("{i}", str(i))
                shape = np.broadcast_to(np.False_, parameters[path].shape)[region].shape
                attention = None if i is None else config.attention[i]
                stored = row.layout.shape(shape)
                yield name, Binding(name, path, row.layout, attention, stored, region)


def match(family: Family, config: DecoderConfig, names: Iterable[str]) -> dict[str, Binding]:
    """Bindings under the names that this checkpoint uses.

    Raises:
      ValueError: naming every tensor that is missing, or stored but unknown.
    """
    names = set(names)
    prefixed = any(name.startswith(family.prefix) for name in names)

    def as_used(bindings: dict[str, Binding]) -> dict[str, Binding]:
        if prefixed:
            return bindings
        renamed = (b._replace(name=b.name.removeprefix(family.prefix)) for b in bindings.values())
        return {binding.name: binding for binding in renamed}

    parameters = parameter_paths(abstract_decoder(config))
    bindings = as_used(_bind_written(family, config, parameters))
    others = as_used(dict(_bind_rows(family.other_forms, config, parameters)))
    held = {binding.path for name, binding in bindings.items() if name in names}
    others = {n: b for n, b in others.items() if n in names and b.path not in held}
    replaced = {binding.path for binding in others.values()}
    bindings = {n: b for n, b in bindings.items() if b.path not in replaced} | others
    wanted = bindings.keys()
    tied_head = [r"^(lm_head|embed_out)\.weight$"] if config.tied else []
    ignored = re.compile("|".join([*family.ignored, *tied_head]))
    extra = {name for name in names - wanted if not ignored.search(name)}
    missing = wanted - names
    if missing or extra:
        problems = [
            f"{what} {', '.join(sorted(found)[:8])}{' ...' if len(found) > 8 else ''}"
            for what, found in (("missing tensors:", missing), ("unknown tensors:", extra))
            if found
        ]
        raise ValueError(f"checkpoint of family {family.model_type}: {'; '.join(problems)}")
    return bindings

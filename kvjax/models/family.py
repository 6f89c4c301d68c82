"""What a checkpoint family declares: how its config.json makes a decoder, and its tensors' names.

One table of `Tensor` rows serves loading, saving and conversion. Parameters are in one canonical
form whatever the family: kernels are (in, out), head h takes columns h*H to (h+1)*H of a
projection's last axis, and a fused projection's last axis is [q | k | v].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from kvjax.nn import AttentionConfig, Decoder, DecoderConfig
from kvjax.nn.sharing import AnyAttentionConfig
from kvjax.sizing import ModelSpec

type Shape = tuple[int, ...]


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


SAME, TRANSPOSED, GROUPED_BY_KV_HEAD = Same(), Transposed(), GroupedByKVHead()
INTERLEAVED, PAIRS_IN_HEADS = Interleaved(), PairsInHeads()


@dataclass(frozen=True)
class Tensor:
    """A stored tensor's name, the parameter's path, and its layout; "{i}" stands for the layer.

    `alias` is a second name that is read too; `name` is what is written.
    """

    name: str
    path: str
    layout: Layout = SAME
    alias: str | None = None


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
    """

    model_type: str
    decoder: Callable[[dict, ModelSpec], DecoderConfig]
    tensors: tuple[Tensor, ...]
    prefix: str = "model."
    kv_heads_field: str | None = "num_key_value_heads"
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)


class Binding(NamedTuple):
    """One stored tensor of one checkpoint, resolved."""

    name: str
    path: str
    layout: Layout
    attention: AnyAttentionConfig | None
    shape: Shape  # as stored
    alias: str | None = None


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
    """Parameter path -> its stored tensor, for every parameter of the decoder."""
    parameters = parameter_paths(abstract_decoder(config))
    bindings = {}
    for row in family.tensors:
        layers = range(len(config.attention)) if "{i}" in row.path else (None,)
        for i in layers:
            path = row.path.replace("{i}", str(i))
            if path in parameters:
                bindings[path] = Binding(
                    name=row.name.replace("{i}", str(i)),
                    path=path,
                    layout=row.layout,
                    attention=None if i is None else config.attention[i],
                    shape=row.layout.shape(parameters[path].shape),
                    alias=row.alias,
                )
    unnamed = parameters.keys() - bindings.keys()
    if unnamed:
        raise LookupError(f"family {family.model_type} names no tensor for {sorted(unnamed)}")
    return bindings


def match(
    family: Family, bindings: dict[str, Binding], names: Iterable[str], tied: bool
) -> dict[str, Binding]:
    """Bindings under the names that this checkpoint uses.

    Raises:
      ValueError: naming every tensor that is missing, or stored but unknown.
    """
    names = set(names)
    prefixed = any(name.startswith(family.prefix) for name in names)

    def used_name(binding: Binding) -> str:
        if binding.name not in names and binding.alias in names:
            return binding.alias
        return binding.name if prefixed else binding.name.removeprefix(family.prefix)

    bindings = {path: b._replace(name=used_name(b)) for path, b in bindings.items()}
    wanted = {binding.name for binding in bindings.values()}
    tied_head = [r"^(lm_head|embed_out)\.weight$"] if tied else []
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

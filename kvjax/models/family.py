"""What a checkpoint family declares: how its config.json makes a decoder, and its tensors' names.

One table of `Tensor` rows serves loading, saving and conversion. Parameters are in one canonical
form whatever the family (`kvjax.models.tensor_layout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from kvjax.models.tensor_layout import SAME, OfLayer, Shape, TensorLayout
from kvjax.nn import Decoder, DecoderConfig
from kvjax.sizing import ModelSpec

type Region = tuple[Any, ...]  # an index of numpy's


@dataclass(frozen=True)
class Tensor:
    """A stored tensor's name, the parameter's path, and its layout; "{i}" stands for the layer.

    A parameter may be stored as several tensors, each of them a part of it: with "{e}" in the name,
    one for each entry e of the first axis (an expert); with `half`, the first (0) or the second (1)
    half of the last axis (the gate and the way up of a gated MLP). A tensor that holds several
    parameters has a row for each.
    """

    name: str
    path: str
    layout: TensorLayout = SAME
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
      ignored: patterns of stored names that carry no parameter of the decoder (buffers of old
        versions); "{depth}" stands for the number of its layers, the first that it has not.
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
    """A stored tensor of one checkpoint, or what one parameter has of it, resolved."""

    name: str
    path: str
    layout: TensorLayout
    attention: OfLayer
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


def bind(family: Family, config: DecoderConfig) -> tuple[Binding, ...]:
    """Where each tensor belongs, for every parameter of the decoder, as it is written."""
    return _bind_written(family, config, parameter_paths(abstract_decoder(config)))


def _bind_written(
    family: Family, config: DecoderConfig, parameters: dict[str, jax.ShapeDtypeStruct]
) -> tuple[Binding, ...]:
    bindings = tuple(_bind_rows(family.tensors, config, parameters))
    unnamed = parameters.keys() - {binding.path for binding in bindings}
    if unnamed:
        raise LookupError(f"family {family.model_type} names no tensor for {sorted(unnamed)}")
    return bindings


def _bind_rows(
    rows: Iterable[Tensor], config: DecoderConfig, parameters: dict[str, jax.ShapeDtypeStruct]
) -> Iterator[Binding]:
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
                stored = row.layout.shape(shape, attention)
                yield Binding(name, path, row.layout, attention, stored, region)


def match(family: Family, config: DecoderConfig, names: Iterable[str]) -> tuple[Binding, ...]:
    """Bindings under the names that this checkpoint uses.

    Raises:
      ValueError: naming every tensor that is missing, or stored but unknown.
    """
    names = set(names)
    prefix = "" if any(name.startswith(family.prefix) for name in names) else family.prefix

    def as_used(bindings: Iterable[Binding]) -> list[Binding]:
        return [b._replace(name=b.name.removeprefix(prefix)) for b in bindings]

    parameters = parameter_paths(abstract_decoder(config))
    bindings = as_used(_bind_written(family, config, parameters))
    others = as_used(_bind_rows(family.other_forms, config, parameters))
    held = {binding.path for binding in bindings if binding.name in names}
    others = [b for b in others if b.name in names and b.path not in held]
    replaced = {binding.path for binding in others}
    bindings = [b for b in bindings if b.path not in replaced] + others
    wanted = {binding.name for binding in bindings}
    tied_head = [r"^(lm_head|embed_out)\.weight$"] if config.tied else []
    patterns = [p.replace("{depth}", str(len(config.attention))) for p in family.ignored]
    ignored = re.compile("|".join([*patterns, *tied_head]))
    extra = {name for name in names - wanted if not ignored.search(name)}
    missing = wanted - names
    if missing or extra:
        problems = [
            f"{what} {', '.join(sorted(found)[:8])}{' ...' if len(found) > 8 else ''}"
            for what, found in (("missing tensors:", missing), ("unknown tensors:", extra))
            if found
        ]
        raise ValueError(f"checkpoint of family {family.model_type}: {'; '.join(problems)}")
    return tuple(bindings)

"""A source that is ready to be converted, and its result as a directory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.convert.compare import Progress
from kvjax.convert.mla.heads import Basis, Heads
from kvjax.convert.mla.layer import Latent, Losses, Way, to_latent
from kvjax.convert.source import Model
from kvjax.models import kvjax_mla
from kvjax.models.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, copy_side_files
from kvjax.models.family import Binding, bind
from kvjax.models.registry import read_decoder
from kvjax.nn import AttentionConfig

type Layers = tuple[dict[str, Binding], ...]  # of each layer's attention, by parameter


@dataclass(frozen=True)
class Prepared:
    """A source, and what of its conversion does not depend on the rank of the latent.

    Attributes:
      checkpoint, source: the source's tensors, and what they are.
      way, rope_dim: how keys are converted, and R.
      moments: of each layer's inputs (`second_moments`).
      bases: coordinates of each layer's keys.
    """

    checkpoint: Checkpoint
    source: Model
    way: Way
    rope_dim: int
    moments: list[np.ndarray]
    bases: list[Basis]

    def target(self, rank: int) -> Target:
        """The model with latents of that rank."""
        attention = self.source.attention
        config = {name: x for name, x in self.source.config.items() if name != "architectures"} | {
            "model_type": kvjax_mla.MODEL_TYPE,
            "source_model_type": self.source.config["model_type"],
            "kv_lora_rank": rank,
            "qk_nope_head_dim": self.way.unrotated(attention.key_dim, self.rope_dim),
            "qk_rope_head_dim": self.rope_dim,
            "rope_heads": self.way.rope_heads(attention.kv_heads),
            "rope_pairs": [basis.pairs.reshape(-1).tolist() for basis in self.bases],
        }
        layers = _attention_layers(config, self.source)
        return Target(config, rank, layers, list(self._plan(layers)))

    def _plan(self, layers: Layers) -> Iterator[list[TensorSpec]]:
        """The source's shards; a layer's new tensors lie where its output projection lay."""
        for shard in self.checkpoint.shards:
            specs = []
            for spec in shard:
                binding = self.source.bindings.get(spec.name)
                if binding is None or ".attention." not in binding.path:
                    specs.append(spec)
                elif binding.path.endswith(".attention.o.kernel"):
                    index = int(binding.path.split(".")[1])
                    own = layers[index].values()
                    specs += [spec._replace(name=new.name, shape=new.shape) for new in own]
            yield specs

    def write(
        self, target: Target, dst_dir: str | os.PathLike[str], on_progress: Progress
    ) -> list[Losses]:
        """Stream the tensors into dst_dir; returns what the layers have lost."""
        specs = {spec.name: spec for shard in target.plan for spec in shard}
        total, done = sum(spec.nbytes for spec in specs.values()), 0
        losses: list[Losses] = []
        with CheckpointWriter(dst_dir, target.plan, target.config) as writer:
            for name, values in self._tensors(target, specs, losses):
                writer.write(name, values)
                done += specs[name].nbytes
                on_progress("converting", done, total)
            copy_side_files(self.checkpoint.directory, writer.directory)
        return losses

    def _tensors(
        self, target: Target, specs: dict[str, TensorSpec], losses: list[Losses]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Names and values; the losses of each layer are added to the list when it is there."""
        new = {binding.name for layer in target.layers for binding in layer.values()}
        for name in specs:
            if name not in new:
                yield name, self.checkpoint.view(name)
        for index, layer in enumerate(target.layers):
            stored = _read(self.checkpoint, self.source, index)
            heads = _heads(stored, _attention(self.source)[index])
            basis, moment = self.bases[index], self.moments[index]
            latent = to_latent(heads, self.way, basis, target.rank, moment)
            losses.append(latent.losses)
            parameters = _parameters(latent, stored)
            for parameter, binding in layer.items():
                values = np.empty(binding.shape, specs[binding.name].dtype)
                binding.layout.write(parameters[parameter], binding.attention, values)
                yield binding.name, values


def prepare(
    checkpoint: Checkpoint, source: Model, way: Way, rope_dim: int, moments: list[np.ndarray]
) -> Prepared:
    """The source with each layer's basis."""
    bases = [
        way.basis(_heads(_read(checkpoint, source, index), attention), rope_dim, moments[index])
        for index, attention in enumerate(_attention(source))
    ]
    return Prepared(checkpoint, source, way, rope_dim, moments, bases)


@dataclass(frozen=True)
class Target:
    """What is written.

    Attributes:
      config: config.json.
      rank: L.
      layers: the tensors of each layer's attention.
      plan: of each of the source's shards, the tensors that take its place.
    """

    config: dict[str, Any]
    rank: int
    layers: Layers
    plan: list[list[TensorSpec]]

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(spec.shape) for shard in self.plan for spec in shard)


def _attention_layers(config: dict[str, Any], source: Model) -> Layers:
    """The tensors of attention, named as the source's are: with a prefix or without."""
    family, decoder = read_decoder(config)
    prefixed = any(name.startswith(family.prefix) for name in source.bindings)
    layers: Layers = tuple({} for _ in decoder.attention)
    for binding in bind(family, decoder):
        if ".attention." in binding.path:
            _, index, _, parameter = binding.path.split(".", 3)
            name = binding.name if prefixed else binding.name.removeprefix(family.prefix)
            layers[int(index)][parameter] = binding._replace(name=name)
    return layers


def _attention(source: Model) -> tuple[AttentionConfig, ...]:
    """Of each layer."""
    return tuple(kvjax_mla.convertible(*item) for item in enumerate(source.decoder.attention))


def _read(checkpoint: Checkpoint, source: Model, index: int) -> dict[str, np.ndarray]:
    """Parameters of a layer's attention in float64, by their names in it."""
    start = f"layers.{index}.attention."
    return {
        binding.path.removeprefix(start): binding.layout.read(
            checkpoint.view(name), binding.attention
        ).astype(np.float64)
        for name, binding in source.bindings.items()
        if binding.path.startswith(start)
    }


def _heads(parameters: Mapping[str, np.ndarray], attention: AttentionConfig) -> Heads:
    """A layer's projections, biases in their last column."""
    rope = attention.rope
    assert rope is not None  # or it could not be converted
    both = np.concatenate(
        [
            np.vstack([parameters[f"{part}.kernel"], _bias(parameters, part)])
            for part in (("qkv",) if attention.fused else ("q", "k", "v"))
        ],
        axis=1,
    )
    q, k, v = (
        part.T.reshape(heads, -1, len(both))
        for part, heads in zip(
            np.split(both, np.cumsum(attention.qkv_widths)[:2], axis=1),
            (attention.query_heads, attention.kv_heads, attention.kv_heads),
            strict=True,
        )
    )
    magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude
    return Heads(q, k, v, rope.dim, magnitude)


def _bias(parameters: Mapping[str, np.ndarray], part: str) -> np.ndarray:
    """0 where the projection has none."""
    return parameters.get(f"{part}.bias", np.zeros(parameters[f"{part}.kernel"].shape[1]))


def _parameters(latent: Latent, stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of latent attention; biases that it has no place for are 0."""
    q = latent.q.reshape(-1, latent.q.shape[-1])
    o = stored["o.kernel"]
    return {
        "q.kernel": q[:, :-1].T,
        "q.bias": q[:, -1],
        "kv_down.kernel": latent.down[:, :-1].T,
        "kv_down.bias": latent.down[:, -1],
        "k_up": latent.k_up,
        "v_up": latent.v_up,
        "o.kernel": o,
        "o.bias": _bias(stored, "o") + latent.value_bias.reshape(-1) @ o,
    }

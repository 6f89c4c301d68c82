"""The checkpoints that are converted: read and checked, without their values."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

from kvjax import sizing
from kvjax.models.checkpoint import Checkpoint
from kvjax.models.family import Binding, match
from kvjax.models.load import check_shapes, find_model
from kvjax.models.registry import read_decoder
from kvjax.nn import AttentionConfig, DecoderConfig

# The configs of these may leave is_encoder_decoder out.
_ENCODER_DECODERS = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Model(NamedTuple):
    """A checkpoint without its values: its config, and the stored tensors that it implies."""

    config: dict[str, Any]
    decoder: DecoderConfig
    bindings: dict[str, Binding]  # by the names that the checkpoint uses

    @property
    def attention(self) -> AttentionConfig:
        """Of every layer, as far as heads and norms go."""
        attention = self.decoder.attention[0]
        assert isinstance(attention, AttentionConfig)  # others are not read
        return attention

    @property
    def parameters(self) -> int:
        return sum(math.prod(binding.shape) for binding in self.bindings.values())


def read(src_dir: str | os.PathLike[str]) -> tuple[Checkpoint, Model]:
    """A checkpoint to convert, its config and tensors checked against each other.

    Raises:
      FileNotFoundError: src_dir or one of its shards is not there.
      ValueError: naming the field or tensor that does not fit.
    """
    directory = find_model(src_dir)
    config = sizing.read_config(directory)
    model_type = config.get("model_type")
    if config.get("is_encoder_decoder") or model_type in _ENCODER_DECODERS:
        raise ValueError(
            f"model_type={model_type!r} is an encoder-decoder: it has cross-attention, and an "
            "encoder that keeps no cache; only decoders can be converted"
        )
    if config.get("quantization_config"):
        raise ValueError(
            f"quantization_config: {directory} is quantised, and codes cannot be mixed; convert "
            "the checkpoint that it was made from"
        )
    checkpoint = Checkpoint(directory)
    model = bind(config, checkpoint.names())
    if not all(isinstance(layer, AttentionConfig) for layer in model.decoder.attention):
        raise ValueError(
            f"model_type={model_type!r} keeps latents; accepted are models with keys and values "
            f"for each KV head"
        )
    check_shapes(checkpoint, model.bindings.values())
    for name in model.bindings:
        if checkpoint.dtype(name).name not in _FLOATS:
            raise ValueError(
                f"tensor {name} is {checkpoint.dtype(name)}: accepted are {', '.join(_FLOATS)}"
            )
    return checkpoint, model


def bind(config: dict[str, Any], names: tuple[str, ...]) -> Model:
    """The model of a config, of which a checkpoint holds the tensors of these names."""
    family, decoder = read_decoder(config)
    bindings = {binding.name: binding for binding in match(family, decoder, names)}
    return Model(config, decoder, bindings)

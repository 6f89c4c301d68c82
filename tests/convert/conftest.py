"""The golden models, and what tests of conversion do with model directories."""

from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax import models
from kvjax.models.checkpoint import Checkpoint, CheckpointWriter


@pytest.fixture(scope="session")
def golden():
    """Models that transformers wrote, and its logits."""
    return Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def read():
    """Name -> values of all tensors of a directory."""

    def read(directory):
        checkpoint = Checkpoint(directory)
        return {name: checkpoint.read(name) for name in checkpoint.names()}

    return read


@pytest.fixture(scope="session")
def edit():
    """Write a copy of a directory with some tensors' values replaced and some config fields."""

    def edit(src, dst, values=(), **fields):
        checkpoint, values = Checkpoint(src), dict(values)
        with CheckpointWriter(dst, checkpoint.shards, checkpoint.config | fields) as writer:
            for name in checkpoint.names():
                old = checkpoint.read(name)
                writer.write(name, np.asarray(values.pop(name, old), old.dtype))
        assert not values
        return dst

    return edit


@pytest.fixture(scope="session")
def forward():
    """Logits (B, T, V) of a directory's model in f32."""
    step = jax.jit(lambda model, tokens: model(tokens)[0])
    return lambda directory, tokens: np.asarray(step(models.load(directory, dtype="f32"), tokens))

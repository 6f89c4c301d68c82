"""A converted model is trained further, and decodes through every kind of cache."""

import jax
import numpy as np
import pytest
from quick import rest_slow

from kvjax import models
from kvjax.convert import Mha2Mla, TransMla, to_mla
from kvjax.engine import generate
from kvjax.models.family import path_name
from kvjax.train import UptrainConfig, uptrain
from kvjax.train.optimizer import decayed

CONFIG = UptrainConfig(steps=12, seq_len=16, batch=4, learning_rate=1e-2, warmup_steps=2)


@pytest.fixture(scope="module")
def converted(golden, tmp_path_factory):
    """qwen2_gqa with half of its rope channels, both ways, and tokens in a pattern to learn."""
    directory = tmp_path_factory.mktemp("uptraining")
    np.save(directory / "tokens.npy", np.tile(np.arange(40), 12))
    for way in (TransMla(), Mha2Mla()):
        to_mla(
            golden / "qwen2_gqa",
            directory / way.name,
            24,
            8,
            way,
            calibrate_tokens=64,
            evaluate_on=False,
        )
    return directory


@pytest.mark.parametrize("way", rest_slow(["transmla", "mha2mla"], ["transmla"]))
def test_the_loss_falls(way, converted, tmp_path):
    losses = []
    uptrain(
        converted / way,
        tmp_path / "dst",
        converted / "tokens.npy",
        CONFIG,
        on_step=lambda metrics: losses.append(metrics["loss"]),
    )
    assert losses[-1] < losses[0] - 1
    before, after = (models.load(directory) for directory in (converted / way, tmp_path / "dst"))
    assert after.config == before.config
    for part in ("k_up", "v_up"):
        old, new = (getattr(m.layers[0].attention, part)[...] for m in (before, after))
        assert old.dtype == new.dtype
        assert (old != new).any()


def test_ways_up_from_latents_are_decayed(converted):
    mask = jax.tree_util.tree_leaves_with_path(decayed(models.load(converted / "transmla")))
    of_layer = {
        path_name(keys).removeprefix("layers.0.attention.")
        for keys, is_decayed in mask
        if is_decayed and path_name(keys).startswith("layers.0.attention.")
    }
    assert of_layer == {"q.kernel", "kv_down.kernel", "k_up", "v_up", "o.kernel"}


@pytest.mark.slow
def test_codecs_hold_latents_and_rope_keys(converted):
    """Tokens one by one through int8 records, and what is generated over them."""
    model = models.load(converted / "mha2mla", "f32")
    tokens = np.random.default_rng(0).integers(0, 96, (1, 24), np.int32)
    step = jax.jit(lambda model, token, cache: model(token, cache))
    cache, parts = model.init_cache(1, 32, codec="int8"), []
    for token in np.split(tokens, 24, axis=1):
        logits, cache = step(model, token, cache)
        parts.append(logits)
    wanted = np.asarray(model(tokens)[0])
    difference = np.abs(np.concatenate(parts, axis=1) - wanted).max()
    assert 0 < difference < 0.1 * np.abs(wanted).max()
    (new,) = generate(model, tokens.tolist(), 4, codec="int8")
    assert len(new) == 4

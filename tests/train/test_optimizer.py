import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax.models import load
from kvjax.models.family import path_name
from kvjax.train import UptrainConfig
from kvjax.train.optimizer import build_optimizer, decayed, learning_rate


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 4, "schedule": "constant"}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 0, "schedule": "constant"}, [1] * 10),
        ({"warmup_steps": 20, "schedule": "cosine"}, [s / 20 for s in range(1, 11)]),
        # Half of the cosine is done at step 7: 0.1 + 0.9 / 2.
        ({"warmup_steps": 4}, {4: 1, 7: 0.55, 10: 0.1, 1: 0.25}),
        ({"warmup_steps": 0}, {5: 0.55, 10: 0.1}),
    ],
)
def test_learning_rate_of_steps_counted_from_one(settings, expected):
    rate = learning_rate(UptrainConfig(steps=10, learning_rate=0.2, **settings))
    if isinstance(expected, list):
        expected = dict(enumerate(expected, start=1))
    for step, share in expected.items():
        np.testing.assert_allclose(rate(step), 0.2 * share, rtol=1e-6)


@pytest.mark.parametrize(("size", "after"), [(3.0, 2.0), (1.0, 1.0)])
def test_gradients_are_clipped_to_the_global_norm(size, after):
    # With decay rates of 0 AdamW's second moment is the clipped gradient, squared.
    config = UptrainConfig(steps=1, clip=2.0, beta1=0.0, beta2=0.0, weight_decay=0.0)
    grads = {"a": jnp.full((2, 2), size / 3), "b": jnp.full((5,), size / 3)}  # norm: size
    optimizer = build_optimizer(config)
    _, state = optimizer.update(grads, optimizer.init(grads), grads)
    squares = optax.tree.get(state, "nu")
    total = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(squares))
    np.testing.assert_allclose(total, after**2, rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["llama_bias", "gpt2_conv1d", "gpt_neox_interleaved", "phi3_fused"]
)
def test_weight_decay_is_for_matrices_but_not_embeddings(golden, name):
    model = load(golden / name)
    leaves = jax.tree_util.tree_leaves_with_path(model)
    mask = jax.tree.leaves(decayed(model))
    for (keys, leaf), shrinks in zip(leaves, mask, strict=True):
        path = path_name(keys)
        assert shrinks == (leaf.ndim == 2 and "embed" not in path and "positions" not in path), path
    assert any(mask)
    assert not all(mask)

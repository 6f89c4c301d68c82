"""Attention modules small enough to be compared with their equations, over caches as well."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache import init_layer_cache

BATCH, TOKENS, D_MODEL = 2, 9, 16
X = np.random.default_rng(0).normal(size=(BATCH, TOKENS, D_MODEL)).astype(np.float32)
POSITIONS = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (BATCH, TOKENS))


def build(config):
    """A module whose parameters are drawn alike, so that no bias and no norm is idle."""
    module = config.build(jnp.float32, nnx.Rngs(0))
    leaves, treedef = jax.tree.flatten(module)
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(
        treedef, [rng.normal(0, 0.3, leaf.shape).astype(np.float32) for leaf in leaves]
    )


def empty(config, layout="dense", codec="f32"):
    """A cache for BATCH rows of TOKENS."""
    return init_layer_cache(
        BATCH,
        TOKENS,
        kv_heads=config.kv_heads,
        value_heads=config.value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        window=config.span,
        layout=layout,
        codec=codec,
    )


@jax.jit
def run(module, *arguments):
    return module(*arguments)


def alone(module):
    """Outputs of all tokens of X at once, without a cache."""
    return run(module, X, POSITIONS)[0]


def in_steps(module, sizes, layout="dense", codec="f32"):
    """Outputs of all tokens of X, taken so many at a time over a cache."""
    cache = empty(module.config, layout, codec)
    outs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        y, cache = run(module, X[:, part], POSITIONS[:, part], cache)
        outs.append(y)
        start += size
    return np.concatenate(outs, axis=1)

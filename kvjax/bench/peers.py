"""The contenders of a decode attention benchmark: this library, and what else does the same.

Each gets the same numbers in the layout that it documents, does its work in one jitted call, and
hands its output out, so that a benchmark can see that all compute one thing.

- kvjax: `ops.decode_attention` over head-major caches (B, K, S, H) with lengths.
- jax.nn: `jax.nn.dot_product_attention` over (B, S, K, H). Where every slot is live it is spared
  the lengths, and so the mask.
- flax.nnx: the decode path of `nnx.MultiHeadAttention`, cache donated: it writes the newest token
  and attends all slots through a mask. `nnx.dot_product_attention` alone is a call of jax.nn's.
- torch: `scaled_dot_product_attention(enable_gqa=True)` over (B, K, S, H), sliced to the live
  tokens; in `kvjax.bench.torch_peer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.bench.case import Case, Inputs
from kvjax.bench.timing import Sampler, time_calls
from kvjax.ops import decode_attention


class AbsentError(RuntimeError):
    """A contender cannot take part; the message says why."""


@dataclass(frozen=True)
class Contender:
    """How to time it, and what it computed: (B, N, H) float32."""

    sample: Sampler
    output: np.ndarray


def build_contender(step: Callable[[], Array], case: Case) -> Contender:
    """The contender of a step whose output has the elements of (B, N, H)."""
    output = np.asarray(step(), np.float32)
    shape = (case.batch, case.query_heads, case.head_dim)
    return Contender(partial(time_calls, step), output.reshape(shape))


def kvjax(case: Case, inputs: Inputs) -> Contender:
    attention = jax.jit(decode_attention)
    return build_contender(lambda: attention(inputs.q, inputs.k, inputs.v, inputs.lengths), case)


def jax_nn(case: Case, inputs: Inputs) -> Contender:
    _check_dtype(case)
    attention = jax.jit(jax.nn.dot_product_attention)
    q, (k, v) = inputs.q[:, None], inputs.token_major
    lengths = None if case.length == case.capacity else inputs.lengths
    return build_contender(lambda: attention(q, k, v, key_value_seq_lengths=lengths), case)


def flax_nnx(case: Case, inputs: Inputs) -> Contender:
    """The module's projections are made to cost nothing and to give the inputs.

    Its input is one-hot over the rows, so that the kernels of q, k and v hold what each row is to
    get; the output projection is taken away.
    """
    try:
        from flax import nnx
    except ImportError as error:
        raise AbsentError(f"not installed: {error}") from None
    _check_dtype(case)
    newest = case.length - 1
    k, v = inputs.token_major
    module = nnx.eval_shape(
        lambda: nnx.MultiHeadAttention(
            num_heads=case.query_heads,
            num_kv_heads=case.kv_heads,
            in_features=case.batch,
            qkv_features=case.query_heads * case.head_dim,
            use_bias=False,
            dtype=case.dtype,
            decode=True,
            rngs=nnx.Rngs(0),
        )
    )
    # Copies, because the module's arrays are donated.
    module.query.kernel = nnx.Param(jnp.copy(inputs.q))
    module.key.kernel, module.value.kernel = nnx.Param(k[:, newest]), nnx.Param(v[:, newest])
    module.cached_key, module.cached_value = nnx.Cache(jnp.copy(k)), nnx.Cache(jnp.copy(v))
    module.cache_index = nnx.Cache(jnp.asarray(newest, jnp.int32))
    module.out = nnx.static(lambda heads, out_sharding: heads)  # type: ignore[assignment]
    graph, first = nnx.split(module)

    @partial(jax.jit, donate_argnames="state")
    def decode(state: nnx.State, x: Array) -> tuple[Array, nnx.State]:
        module = nnx.merge(graph, state)
        out = module(x)
        module.cache_index = nnx.Cache(jnp.asarray(newest, jnp.int32))  # every call is the same
        return out, nnx.split(module)[1]

    held = {"state": first}
    rows = jnp.eye(case.batch, dtype=case.dtype)[:, None]

    def step() -> Array:
        out, held["state"] = decode(held["state"], rows)
        return out

    return build_contender(step, case)


def _check_dtype(case: Case) -> None:
    if case.codec == "f16" and jax.default_backend() == "cpu":
        raise AbsentError("jax.nn.dot_product_attention takes no f16 on CPUs")


BUILDERS = {"kvjax": kvjax, "jax.nn": jax_nn, "flax.nnx": flax_nnx}

"""Who is timed on a GPU: this library, and what else decodes there, each over the same arrays.

- kvjax: the public function, held to its kernel.
- kvjax xla: the same in plain JAX, compiled by XLA.
- jax cudnn: `jax.nn.dot_product_attention(implementation="cudnn")` over (B, S, K, H), as it keeps
  caches; all slots are live, so it is spared the lengths.
- jax triton: jax's deprecated Pallas-Triton kernel. It takes (B, S, K, H) and transposes that to
  head-major; it gets transposed head-major arrays, of which XLA makes nothing.
- torch sdpa, torch flex: `scaled_dot_product_attention` and a compiled `flex_attention`, both with
  enable_gqa, over (B, K, S, H).
- flashinfer: its wrapper for decode over pages, with tensor cores.

None but this library is required: whoever cannot take part says why.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.bench.gpu.shape import DecodeShape, Operands, attend
from kvjax.bench.peers import AbsentError
from kvjax.bench.timing import Sampler

KERNEL = "mosaic_gpu"
# Triton addresses elements with 32 bits.
TRITON_ELEMENTS = 2**31
FLASHINFER_WORKSPACE = 2**28


class JaxPeer(NamedTuple):
    """A contender that is jitted.

    Attributes:
      step: q and operands to an output like q.
      prepare: makes its operands of `shape.operands`; None where it takes those.
    """

    step: Callable[[Array, Any], Array]
    prepare: Callable[[Operands], Operands] | None = None


def jax_peer(name: str, shape: DecodeShape) -> JaxPeer:
    """The contender of that name.

    Raises:
      AbsentError: if it cannot serve the shape here; it says why.
    """
    match name:
        case "kvjax":
            # Held to the kernel where there is one, so that nothing else is timed in its place.
            on_gpu = jax.default_backend() == "gpu"
            return JaxPeer(partial(attend, shape, implementation=KERNEL if on_gpu else None))
        case "kvjax xla":
            return JaxPeer(partial(attend, shape, implementation="xla"))
        case "jax cudnn":
            _check_plain(shape)
            return JaxPeer(partial(_cudnn, shape.scale), _token_major)
        case "jax triton":
            _check_plain(shape)
            return JaxPeer(_triton(shape))
    raise ValueError(f"peer {name!r}: accepted are kvjax, kvjax xla, jax cudnn, jax triton")


def is_torch(name: str) -> bool:
    """Whether that contender runs in torch."""
    return name in TORCH_PEERS


def torch_peer(
    name: str, shape: DecodeShape, q: Array, caches: Sequence[Operands]
) -> tuple[Sampler, np.ndarray]:
    """The contender of that name, over the arrays as they lie.

    Returns:
      What samples so many passes over all caches, and the output (B, N, H) over the first.

    Raises:
      AbsentError: if it cannot serve the shape here; it says why.
    """
    torch = _import("torch")
    if not torch.cuda.is_available():
        raise AbsentError("torch finds no CUDA device")
    step = TORCH_PEERS[name](torch, shape, caches[0])
    query = torch.from_dlpack(q)
    held = [(torch.from_dlpack(one["k"]), torch.from_dlpack(one["v"])) for one in caches]

    def sample(passes: int) -> float:
        with torch.inference_mode():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(passes):
                for k, v in held:
                    step(query, k, v)
            torch.cuda.synchronize()
            return time.perf_counter() - start

    with torch.inference_mode():
        output = step(query, *held[0]).float().cpu().numpy()
    return sample, output.reshape(q.shape)


def _check_plain(shape: DecodeShape, *, pages: bool = False) -> None:
    """AbsentError but for 16-bit K and V without windows and the like, all slots live."""
    special = shape.rope_dim or shape.scales or shape.window or shape.soft_cap or shape.sinks
    if special or shape.codec != shape.query or (shape.live != shape.slots).any():
        raise AbsentError("compared on full 16-bit caches of K and V alone")
    if (shape.page_size is not None) != pages:
        raise AbsentError("it takes no pages" if shape.page_size else "it takes pages alone")


def _cudnn(scale: float, q: Array, operands: Operands) -> Array:
    out = jax.nn.dot_product_attention(
        q[:, None], operands["k"], operands["v"], scale=scale, implementation="cudnn"
    )
    return out[:, 0]


@jax.jit
def _token_major(operands: Operands) -> Operands:
    return {name: jnp.swapaxes(operands[name], 1, 2) for name in ("k", "v")}


def _triton(shape: DecodeShape) -> Callable[[Array, Operands], Array]:
    if math.prod((shape.batch, shape.kv_heads, shape.slots, shape.key_dim)) >= TRITON_ELEMENTS:
        raise AbsentError("its addresses overflow at 2^31 elements of K")
    if jax.default_backend() != "gpu":
        raise AbsentError("it needs a GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.experimental.pallas.ops.gpu.decode_attention import gqa
        except ImportError as error:
            raise AbsentError(f"not in this jax: {error}") from None

    def step(q: Array, operands: Operands) -> Array:
        k, v = (jnp.swapaxes(operands[name], 1, 2) for name in ("k", "v"))
        return gqa(q, k, v, sm_scale=shape.scale)

    return step


def _sdpa(torch: Any, shape: DecodeShape, cache: Operands) -> Callable[..., Any]:
    _check_plain(shape)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: attention(q[:, :, None], k, v, scale=shape.scale, enable_gqa=True)


def _flex(torch: Any, shape: DecodeShape, cache: Operands) -> Callable[..., Any]:
    _check_plain(shape)
    from torch.nn.attention.flex_attention import flex_attention

    attention = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attention(q[:, :, None], k, v, scale=shape.scale, enable_gqa=True)


def _flashinfer(torch: Any, shape: DecodeShape, cache: Operands) -> Callable[..., Any]:
    _check_plain(shape, pages=True)
    assert shape.page_size is not None
    flashinfer = _import("flashinfer")
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    ends = np.concatenate([[0], np.cumsum(shape.pages)]).astype(np.int32)
    table = np.asarray(cache["page_table"])
    pages = np.concatenate([row[:n] for row, n in zip(table, shape.pages, strict=True)])
    last = (shape.live[:, 0] - 1) % shape.page_size + 1
    wrapper.plan(
        *(torch.from_numpy(x.astype(np.int32)).cuda() for x in (ends, pages, last)),
        shape.query_heads,
        shape.kv_heads,
        shape.key_dim,
        shape.page_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        sm_scale=shape.scale,
    )
    return lambda q, k, v: wrapper.run(q, (k, v))


def _import(name: str) -> Any:
    """A module that may be missing, or broken in ways of its own."""
    try:
        return __import__(name)
    except Exception as error:
        raise AbsentError(f"cannot be imported: {type(error).__name__}: {error}") from None


TORCH_PEERS: dict[str, Callable[..., Callable[..., Any]]] = {
    "torch sdpa": _sdpa,
    "torch flex": _flex,
    "flashinfer": _flashinfer,
}

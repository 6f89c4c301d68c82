"""The cases as programs: a function with its arguments, compiled for a GPU that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kernel_check.cases import (
    KV_HEADS,
    LATENT,
    ROPE,
    ROWS,
    SLOTS,
    SOFT_CAP,
    WINDOW,
    Case,
    KernelCase,
    LatentCase,
)
from kernel_check.expected import KernelName, Planned
from kernel_check.targets import TARGETS
from kvjax import ops
from kvjax.kernels.mosaic_gpu import ampere, choice, decode, latent
from kvjax.kernels.mosaic_gpu.plan import Plan, Shape

KERNELS: dict[Callable[..., Any], KernelName] = {
    decode.decode: "decode",
    latent.decode: "latent",
    ampere.decode: "ampere",
}


@dataclass(frozen=True)
class Call:
    """A program and what is known of it.

    Attributes:
      function: of `arguments`.
      arguments: pytrees of shapes and dtypes.
      caches: arguments that are caches, by number.
      donated: those whose memory the outputs take.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    caches: tuple[int, ...]
    donated: tuple[int, ...] = ()


class Compiled(NamedTuple):
    """What came of a call: XLA's program, and plans of the kernels in the order of their making."""

    program: Any
    plans: list[Planned]


def compile_call(call: Call, target: str) -> Compiled:
    """A call compiled ahead of time.

    Raises:
      Exception: what the compilers make of a program that they refuse.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=TARGETS[target].config
    )
    mesh = Mesh(np.array(topology.devices), ("_",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), call.arguments
    )
    jitted = jax.jit(call.function, donate_argnums=call.donated)
    # The default device is what the library plans for, and what Mosaic compiles for.
    with jax.default_device(topology.devices[0]), noted_plans() as plans:
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    return Compiled(lowered.compile(), plans)


@contextlib.contextmanager
def noted_plans() -> Iterator[list[Planned]]:
    """The plans of the calls that are traced meanwhile."""
    found: list[Planned] = []
    choose = choice.choose

    def noted(shape: Shape, *gpu: Any) -> choice.Choice:
        chosen = choose(shape, *gpu)
        found.append(Planned(shape, chosen.plan, KERNELS[chosen.kernel]))
        return chosen

    with mock.patch.object(choice, "choose", noted):
        yield found


@contextlib.contextmanager
def changed_plans(change: Callable[[Plan], Plan]) -> Iterator[None]:
    """Plans other than the library's own."""
    choose = choice.choose

    def changed(*given: Any) -> choice.Choice:
        chosen = choose(*given)
        return chosen._replace(plan=change(chosen.plan))

    with mock.patch.object(choice, "choose", changed):
        yield


@contextlib.contextmanager
def multiplied_by(unit: str) -> Iterator[None]:
    """Kernels with that unit, whatever the target's own is."""
    with mock.patch.object(choice, "unit_of", return_value=unit):
        yield


def call(case: KernelCase) -> Call:
    """The library's function on a case's arrays."""
    return latent_call(case) if isinstance(case, LatentCase) else decode_call(case)


def decode_call(case: Case) -> Call:
    """`ops.decode_attention`."""
    key_dim, value_dim = case.dims
    kv_heads = KV_HEADS[case.group]
    place, table = _place(kv_heads, case.page, case.slots)
    scales = {
        None: None,
        "": array((), "float32"),
        "K": array((kv_heads,), "float32"),
        "BKS": array(place, "float32"),
    }[case.storage.scales]
    arguments = {
        "q": array((ROWS, kv_heads * case.group, key_dim), case.storage.query),
        "lengths": array((ROWS,), "int32"),
        "page_table": table,
    }
    cache = {
        "k": array((*place, key_dim), case.storage.dtype),
        "v": array((*place, value_dim), case.storage.dtype),
        "k_scale": scales,
        "v_scale": scales,
    }

    def function(arguments: dict[str, Any], cache: dict[str, Any]) -> Any:
        return ops.decode_attention(
            **arguments,
            **cache,
            window=WINDOW if "window" in case.rules else None,
            soft_cap=SOFT_CAP if "soft cap" in case.rules else None,
            implementation="mosaic_gpu",
        )

    return Call(function, (arguments, cache), caches=(1,))


def latent_call(case: LatentCase) -> Call:
    """`ops.latent_decode_attention`."""
    place, table = _place(None, case.page, SLOTS)
    arguments = {
        "q_latent": array((ROWS, case.heads, LATENT), "bfloat16"),
        "q_rope": array((ROWS, case.heads, ROPE), "bfloat16"),
        "lengths": array((ROWS,), "int32"),
        "page_table": table,
    }
    cache = {
        "latent": array((*place, LATENT), "bfloat16"),
        "k_rope": array((*place, ROPE), "bfloat16"),
    }

    def function(arguments: dict[str, Any], cache: dict[str, Any]) -> Any:
        return ops.latent_decode_attention(
            **arguments, **cache, scale=(128 + ROPE) ** -0.5, implementation="mosaic_gpu"
        )

    return Call(function, (arguments, cache), caches=(1,))


def array(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    """An array that is only described."""
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _place(kv_heads: int | None, page: int | None, slots: int) -> tuple[tuple[int, ...], Any]:
    """The axes of a cache before the last, and its page table."""
    heads = () if kv_heads is None else (kv_heads,)
    if page is None:
        return (ROWS, *heads, slots), None
    table = array((ROWS, slots // page), "int32")
    return (ROWS * slots // page, *heads, page), table

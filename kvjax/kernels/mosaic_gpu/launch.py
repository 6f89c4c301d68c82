"""What every kernel is launched by: arrays in, and the outputs and LSEs of all splits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.mosaic_gpu.settings import Inputs, Outputs, Settings


def launch(
    body: Callable[..., None],
    settings: Settings,
    inputs: Inputs,
    scratch: Sequence[Any],
    grid: Mapping[str, int],
    *,
    columns: int,
    interpret: plgpu.InterpretGPUParams | None,
    warpgroups: int | None = None,
    **compiler: Any,
) -> Outputs:
    """Run `body(inputs, outputs, *scratch)` in every block, over references.

    Args:
      body: one block's work.
      settings: of the kernel.
      inputs: arrays.
      scratch: what a block allocates.
      grid: names and sizes of the axes of blocks; the last ones run side by side.
      columns: of the outputs, HV or more.
      interpret: runs the kernel in Pallas' interpreter for GPUs.
      warpgroups: of a block, on the axis "warpgroup"; None for one, and no such axis.
      compiler: further parameters of the compiler.
    """
    arrays, tree = jax.tree.flatten(inputs)

    def block(*refs: Any) -> None:
        given, (out, lse, *rest) = refs[: len(arrays)], refs[len(arrays) :]
        body(jax.tree.unflatten(tree, given), Outputs(out, lse), *rest)

    rows = (settings.plan.splits, *inputs.q[0].shape[:3])
    run = plgpu.kernel(
        block,
        out_type=[
            jax.ShapeDtypeStruct((*rows, columns), jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ],
        scratch_types=[*scratch],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            **compiler,
        ),
        interpret=interpret,
    )
    return Outputs(*run(*arrays))

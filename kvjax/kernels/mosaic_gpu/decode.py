"""Decode attention by splits of each row, after Flash-Decoding and FlashAttention-3.

A block of two warpgroups takes a stretch of one row's slots for all query heads of one KV head.
One warpgroup copies tiles of 64 keys and values into a ring of stages (`copying`); the other
multiplies them with the queries (S^T = K Q^T), keeps an online softmax, and sums up weighted values
(O^T = V^T P^T, `attending`). Keys and values are the large operands of these products, queries and
weights the small ones: a group of 1 to 8 heads costs the same as one of 8, and nothing is repeated
for the heads of a group.

Each byte of the cache's live slots is read once for each `most_heads` query heads of a group (64,
or 32 where heads are wider than 128; further reads find them in L2). Beside it, queries are read,
and for each split float32 outputs and LSEs written, which `kvjax.ops` merges: 1/16 of the cache's
bytes where a split has 16 tiles, a group 8 heads, and both are 128 wide.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.mosaic_gpu.attending import attend_tiles, write, write_nothing
from kvjax.kernels.mosaic_gpu.copying import copy_tiles
from kvjax.kernels.mosaic_gpu.launch import launch
from kvjax.kernels.mosaic_gpu.plan import Plan
from kvjax.kernels.mosaic_gpu.settings import Inputs, Outputs, Scratch, Settings


def decode(
    inputs: Inputs,
    plan: Plan,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Outputs:
    """Outputs and LSEs of each split, to be merged. See `Outputs`.

    Args:
      inputs: q in f16 or bf16; k and v in the same, or in e4m3 (with f16) or int8 (with bf16).
      plan: for these shapes; q has a multiple of its `heads`.
      scale, soft_cap, window: of the scores, as in `ops.decode_attention`.
      interpret: runs the kernel in Pallas' interpreter for GPUs.
    """
    batch, kv_heads, heads, _ = inputs.q[0].shape
    settings = Settings.of(inputs, plan, interpret is not None, scale, soft_cap, window)
    # Blocks that read the same tiles, where a group is several, run side by side.
    grid = {"split": plan.splits, "row": batch, "head": kv_heads * heads // plan.heads}
    return launch(
        partial(_block, settings),
        settings,
        inputs,
        [settings.scratch()],
        grid,
        columns=settings.value_dim,
        interpret=interpret,
        warpgroups=2,
    )


def _block(settings: Settings, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    """One split of one row, for one KV head's queries or some of them."""
    many = settings.plan.heads
    split, head, row = (lax.axis_index(name) for name in ("split", "head", "row"))
    parts = jnp.int32(inputs.q[0].shape[2] // many)
    kv_head, heads = lax.div(head, parts), pl.ds(lax.rem(head, parts) * many, many)
    span = settings.span(inputs, row, kv_head, split)
    copies = lax.axis_index("warpgroup") == 1

    @pl.when(copies & (span.tiles > 0))
    def _copy() -> None:
        for source, target in zip(inputs.q, scratch.q, strict=True):
            plgpu.copy_gmem_to_smem(source.at[row, kv_head, heads], target, scratch.q_full)
        copy_tiles(settings, inputs, scratch, span, row, kv_head)

    @pl.when(~copies)
    def _attend() -> None:
        at = (split, row, kv_head, heads)

        @pl.when(span.tiles > 0)
        def _live() -> None:
            factor = None if inputs.key_factor is None else inputs.key_factor[kv_head]
            write(settings, attend_tiles(settings, scratch, span, factor), scratch)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch.out, outputs.out.at[at])

        @pl.when(span.tiles == 0)
        def _empty() -> None:
            write_nothing(settings, scratch)
            plgpu.commit_smem()

        plgpu.copy_smem_to_gmem(scratch.lse, outputs.lse.at[at])
        plgpu.wait_smem_to_gmem(0)

"""One case compiled and held to all its budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernel_check.budgets import Fault, check_kernel
from kernel_check.calls import Call, Compiled, compile_call
from kernel_check.expected import Planned, expected
from kernel_check.hlo import kernel_calls, large_results
from kernel_check.machine_code import Kernel, read_kernel
from kernel_check.targets import TARGETS

# Of temporaries: what XLA keeps beside arrays that follow from the shapes.
SLACK = 64 * 1024
# Columns of float32 in a cache line, whole ones of which some kernels write.
LINE = 32


class Checked(NamedTuple):
    """What was found of a case: facts for the baseline, and faults."""

    facts: dict[str, Any]
    faults: list[Fault]


def check_call(call: Call, target: str, dump: Path, page: int | None) -> Checked:
    """Compile a call of one kernel, which leaves its machine code in `dump`, and check it.

    A program that the compilers refuse is a fault, too.
    """
    try:
        compiled = compile_call(call, target)
    except Exception as error:
        return Checked({}, [refusal(error)])
    if len(compiled.plans) != 1:
        return Checked({}, [Fault("kernels", f"{len(compiled.plans)} plans were made, not one")])
    kernel, [planned] = read_kernel(dump), compiled.plans
    wanted = expected(planned, page)
    faults = [*check_kernel(kernel, wanted, TARGETS[target], planned.plan.residents)]
    faults += check_program(call, compiled, parts_bytes(planned))
    return Checked(facts(kernel), faults)


def refusal(error: Exception) -> Fault:
    """The fault of a program that does not compile."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Fault("refused", f"{type(error).__name__}: {' '.join(lines)[:400]}")


def facts(kernel: Kernel) -> dict[str, Any]:
    """What the baseline keeps of a kernel."""
    codes = kernel.codes
    return {
        "registers": kernel.report.registers,
        "shared": kernel.report.shared_bytes,
        "products": dict(sorted(kernel.products.items())),
        "loop": kernel.loop_codes(kernel.product_loops).total(),
        "step": kernel.step_instructions,
        "fences": sum(many for code, many in codes.items() if code.startswith("FENCE.VIEW.ASYNC")),
    }


def check_program(call: Call, compiled: Compiled, most: int) -> Iterator[Fault]:
    """What a program does beside its kernels, with at most so many bytes of temporaries."""
    program, stats = compiled.program, compiled.program.memory_analysis()
    leaves = [nbytes(leaf) for i in call.caches for leaf in jax.tree.leaves(call.arguments[i])]
    # The smallest are counts, flags and tables of pages.
    if made := large_results(program.as_text(), min(n for n in leaves if n > SLACK)):
        yield Fault("copies", f"arrays as large as one of the cache are made by {', '.join(made)}")
    if stats.temp_size_in_bytes > most + SLACK:
        yield Fault(
            "temporaries",
            f"{stats.temp_size_in_bytes} bytes; what the kernel leaves to be merged takes {most}, "
            f"and {SLACK} more are accepted",
        )
    donated = sum(nbytes(leaf) for i in call.donated for leaf in jax.tree.leaves(call.arguments[i]))
    if stats.alias_size_in_bytes != donated:
        yield Fault(
            "copies",
            f"{stats.alias_size_in_bytes} of {donated} donated bytes are written in place",
        )
    if not kernel_calls(program.as_text()):
        yield Fault("kernels", "no kernel is called")


def parts_bytes(planned: Planned) -> int:
    """Bytes of the queries, filled up, and of the outputs of all splits."""
    shape, plan, _ = planned
    heads = -(-shape.group // plan.heads) * plan.heads
    rows = shape.batch * shape.kv_heads * heads
    # Once side by side, and once in the parts that latents have.
    queries = 2 * rows * sum(shape.key_dims) * jnp.dtype(shape.operand).itemsize
    columns = -(-(shape.value_dim or shape.key_dims[0]) // LINE) * LINE
    # Beside the outputs, LSEs and what the merge makes of them.
    return queries + plan.splits * rows * (columns + 4) * 4


def nbytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array."""
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize

"""The budgets that a kernel is held to, whatever its baseline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kernel_check.expected import Expected
from kernel_check.machine_code import COPIES, LOADS, Copies, Kernel, Report, named
from kernel_check.targets import REGISTERS, SYSTEM_BYTES, Target


class Fault(NamedTuple):
    """A budget that is not kept.

    Attributes:
      kind: which one, in a word.
      text: what was found, and what would do.
    """

    kind: str
    text: str


def check_kernel(
    kernel: Kernel, wanted: Expected, target: Target, residents: int
) -> Iterator[Fault]:
    """All faults of a kernel, `residents` blocks of which are meant to share a multiprocessor."""
    yield from check_report(kernel.report, target, residents)
    yield from check_codes(kernel.codes)
    yield from check_products(kernel.products, wanted)
    yield from check_loads(kernel, wanted)
    if kernel.unfenced:
        yield Fault(
            "fence",
            f"{_listed(Counter(kernel.unfenced))} may read what registers stored to shared memory "
            f"without a proxy fence between (plgpu.commit_smem)",
        )
    if kernel.unsynchronised:
        yield Fault(
            "barrier",
            f"{_listed(Counter(kernel.unsynchronised))} may come before other warps' stores or "
            f"loads: there is no barrier between",
        )
    if len(kernel.unfenced_releases) > wanted.exchanges:
        yield Fault(
            "fence",
            f"{len(kernel.unfenced_releases)} stages are given back to the copies after loads "
            f"from them without a proxy fence between (plgpu.commit_smem)",
        )


def check_report(report: Report, target: Target, residents: int) -> Iterator[Fault]:
    """Spills, and what a multiprocessor has for so many blocks."""
    if report.spill_bytes or report.stack_bytes:
        yield Fault(
            "spill",
            f"{report.spill_bytes} bytes of spills and {report.stack_bytes} of stack a thread, at "
            f"{report.registers} registers; none are accepted",
        )
    # A warp gets registers 256 at a time, 8 for each thread.
    registers = -(-report.registers // 8) * 8 * report.threads * residents
    if registers > REGISTERS:
        yield Fault(
            "registers",
            f"{residents} blocks of {report.threads} threads with {report.registers} registers "
            f"take {registers} of {REGISTERS}",
        )
    if report.shared_bytes > target.block_bytes:
        yield Fault(
            "shared memory",
            f"{report.shared_bytes} bytes; a block may have {target.block_bytes}",
        )
    shared = residents * (report.shared_bytes + SYSTEM_BYTES)
    if shared > target.shared_bytes:
        yield Fault(
            "shared memory",
            f"{residents} blocks of {report.shared_bytes} + {SYSTEM_BYTES} bytes take {shared} of "
            f"{target.shared_bytes}",
        )


def check_codes(codes: Counter[str]) -> Iterator[Fault]:
    """Local memory must not be touched."""
    if local := named(codes, ("LDL", "STL")):
        yield Fault("spill", f"local memory is used by {_listed(local)}; it must not be")


def check_products(products: Counter[str], wanted: Expected) -> Iterator[Fault]:
    """The matrix instructions of the loops: those expected, and no other."""
    if not _tiles(products, wanted):
        yield Fault(
            "products",
            f"loops have {_listed(products) or 'no matrix instruction'}; a tile takes "
            f"{_listed(Counter(wanted.products))}",
        )


def _tiles(products: Counter[str], wanted: Expected) -> int:
    """How many tiles' products these are; 0 if they are not those of whole tiles."""
    found = {
        prefix: sum(many for code, many in products.items() if f"{code}.".startswith(f"{prefix}."))
        for prefix in wanted.products
    }
    tiles = min(many // wanted.products[prefix] for prefix, many in found.items())
    whole = {prefix: tiles * many for prefix, many in wanted.products.items()}
    return tiles if found == whole and sum(found.values()) == products.total() else 0


def check_loads(kernel: Kernel, wanted: Expected) -> Iterator[Fault]:
    """How the cache is loaded: by copies past the registers, each byte once."""
    made = named(kernel.loop_codes(kernel.copy_loops), COPIES)
    if not made or made != _like(made, wanted.copies):
        yield Fault(
            "loads",
            f"tiles are copied by {_listed(made) or 'nothing'}; accepted is {wanted.copies}",
        )
    if small := _like(kernel.loop_codes(kernel.product_loops), r"LDS\.[US](8|16)\b"):
        yield Fault("loads", f"the product loop has {_listed(small)}; accepted are 32 bits or more")
    loads = named(kernel.codes, LOADS)
    if wide := loads - _like(loads, r"\w+\.E(\.CONSTANT)?$"):
        yield Fault("loads", f"{_listed(wide)} load from global memory; accepted are 32 bits each")
    for nbytes, waits in kernel.copies or [Copies(0, 0)]:
        # A loop that was unrolled copies as many tiles as it waits for, or multiplies.
        tiles = waits // wanted.waits if wanted.waits else _tiles(kernel.products, wanted)
        if not tiles or nbytes != tiles * wanted.nbytes:
            yield Fault(
                "bytes",
                f"{nbytes} bytes are copied, for {tiles} tiles; keys, values and scales of one are "
                f"{wanted.nbytes}",
            )
    only_multiply = {*kernel.product_loops} - {*kernel.copy_loops}
    for loop in kernel.load_loops:
        scalars = named(kernel.loop_codes([loop]), LOADS)
        accepted = 0 if loop in only_multiply else tiles * wanted.scalars
        if scalars.total() > accepted:
            yield Fault(
                "loads",
                f"a loop has {_listed(scalars)} from global memory into registers; accepted are "
                f"{accepted}, of pages and scales",
            )


def _like(codes: Counter[str], pattern: str) -> Counter[str]:
    return Counter({code: many for code, many in codes.items() if re.match(pattern, code)})


def _listed(codes: Counter[str]) -> str:
    return ", ".join(f"{many} {code}" for code, many in sorted(codes.items()))

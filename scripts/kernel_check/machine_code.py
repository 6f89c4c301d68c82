"""What the compiler says of a kernel, and what its instructions are found to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kernel_check.flow import Flow, Loop
from kernel_check.listing import Instruction, read_ptx, read_sass

WARPGROUP = 128
# Matrix instructions, and copies from global to shared memory past the registers.
PRODUCTS = ("HGMMA", "HMMA", "QGMMA", "IGMMA", "IMMA", "QMMA")
COPIES = ("UTMALDG", "LDGSTS", "UBLKCP")
# From global memory into registers.
LOADS = ("LDG", "LD")
# What reads shared memory by the asynchronous proxy: matrix units, and copies to global memory.
PAST_REGISTERS = ("HGMMA", "QGMMA", "IGMMA", "UTMASTG", "UBLKCP", "UTMAREDG")
# In PTX.
ASYNC_COPIES = ("cp.async.ca.", "cp.async.cg.")


@dataclass(frozen=True)
class Report:
    """What ptxas and Mosaic report.

    Attributes:
      registers: of a thread.
      stack_bytes, spill_bytes: of a thread; loads and stores together.
      shared_bytes: of a block, with its barriers.
      threads: of a block.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    threads: int


class Copies(NamedTuple):
    """Of one way round a loop: bytes that are copied to shared memory, and waits at barriers."""

    nbytes: int
    waits: int


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: the compilers' report, and control flow in SASS and in PTX."""

    report: Report
    sass: Flow
    ptx: Flow

    @property
    def codes(self) -> Counter[str]:
        """How often each instruction stands in it."""
        return _codes([i for block in self.sass.order for i in self.sass.blocks[block]])

    @property
    def product_loops(self) -> list[Loop]:
        """The loops of the matrix instructions."""
        return self.sass.loops_with(_is(*PRODUCTS))

    @property
    def copy_loops(self) -> list[Loop]:
        """The loops that fill shared memory."""
        return self.sass.loops_with(_is(*COPIES))

    @property
    def load_loops(self) -> list[Loop]:
        """The loops that load from global memory into registers."""
        return self.sass.loops_with(_is(*LOADS))

    def loop_codes(self, loops: list[Loop]) -> Counter[str]:
        """How often each instruction stands in the loops."""
        return _codes([i for loop in loops for i in self.sass.instructions(loop)])

    @property
    def products(self) -> Counter[str]:
        """Matrix instructions of the loops."""
        return named(self.loop_codes(self.product_loops), PRODUCTS)

    @property
    def step_instructions(self) -> int:
        """Instructions of the shortest way round all product loops, past all products."""
        return sum(self.sass.shortest_way(loop, _is(*PRODUCTS)) for loop in self.product_loops)

    @property
    def unfenced(self) -> list[str]:
        """Reads by the matrix units or by copies out of what registers stored without a fence.

        Both read shared memory by the asynchronous proxy: they may miss what was stored through
        the generic one, on any way from the store to them that has no proxy fence.
        """
        found = self.sass.reached(_is("STS", "STSM"), _fences, _is(*PAST_REGISTERS))
        return [instruction.code for instruction in found]

    @property
    def unfenced_releases(self) -> list[str]:
        """Arrivals at barriers without a fence behind loads of shared memory.

        The copy that waits for the barrier writes by the asynchronous proxy over what was loaded.
        """
        found = self.sass.reached(_is("LDS", "LDSM"), _fences, _arrives)
        return [instruction.code for instruction in found]

    @property
    def unsynchronised(self) -> list[str]:
        """Loads of shared memory behind stores, and copies over what was loaded, with no barrier.

        Stores over what was loaded are not counted: mostly they go elsewhere.
        """
        found = self.sass.reached(_is("STS", "STSM"), _is("BAR"), _is("LDS", "LDSM"))
        found += self.sass.reached(_is("LDS", "LDSM"), _is("BAR"), _is("LDGSTS"))
        return [instruction.code for instruction in found]

    @property
    def copies(self) -> list[Copies]:
        """What each of the copying loops copies in one way round.

        Tensor copies are taken from what barriers are told to expect (mbarrier.arrive.expect_tx): a
        barrier opens when exactly so many bytes have come, so in a kernel that gets on these are
        the bytes that are copied. The boxes of the copies stand in descriptors that the host fills
        in at launch. An asynchronous copy (cp.async) has its bytes beside it.

        Raises:
          ValueError: if an amount is not a constant.
        """
        constants, found = _constants(self.ptx), []
        for loop in self.ptx.loops_with(_copies_in_ptx):
            inside = self.ptx.instructions(loop)
            nbytes = sum(_bytes(instruction, constants) for instruction in inside)
            waits = sum(i.code.startswith("mbarrier.try_wait") for i in inside)
            found.append(Copies(nbytes, waits))
        return found


def read_kernel(dump: Path) -> Kernel:
    """The only kernel that was dumped into a directory.

    Raises:
      ValueError: if there is none or another, or something is not as expected.
    """

    def text(suffix: str) -> str:
        # The parts of a kernel are not always numbered alike.
        found = [*dump.glob(f"*{suffix}")]
        if len(found) != 1:
            raise ValueError(
                f"{len(found)} files {suffix} of one kernel; there is none if a call before it in "
                f"the same process had the same kernel"
            )
        return found[0].read_text()

    ptx = text(".ptx")
    report = read_report(text(".ptxas"), text(".resources.txt"), ptx)
    return Kernel(report, Flow(read_sass(text(".sass_ctrl"))), Flow(read_ptx(ptx)))


def read_report(ptxas: str, resources: str, ptx: str) -> Report:
    """The report in what ptxas prints, Mosaic's resources, and the head of the PTX.

    Raises:
      ValueError: if a figure is missing.
    """

    def figure(pattern: str, text: str) -> int:
        found = re.findall(pattern, text)
        if len(found) != 1:
            raise ValueError(f"{len(found)} figures like {pattern!r} in the compiler's report")
        return int(found[0])

    # Counter({Barrier(arrival_count=1, num_barriers=3, ...): 4, ...}), each of 8 bytes.
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    shared = figure(r"smem_scratch_bytes=(\d+)", resources)
    return Report(
        registers=figure(r"Used (\d+) registers", ptxas),
        stack_bytes=figure(r"(\d+) bytes stack frame", ptxas),
        # A warning says the same before it, where there are any.
        spill_bytes=figure(r"stack frame, (\d+) bytes spill stores", ptxas)
        + figure(r"stack frame, .* (\d+) bytes spill loads", ptxas),
        shared_bytes=shared + sum(8 * int(many) * int(arrays) for many, arrays in barriers),
        threads=figure(r"\.maxntid (\d+), 1, 1", ptx),
    )


def named(codes: Counter[str], names: tuple[str, ...]) -> Counter[str]:
    """Those instructions that have one of these names, whatever their modifiers."""
    return Counter({code: many for code, many in codes.items() if code.split(".")[0] in names})


def _is(*names: str) -> Callable[[Instruction], bool]:
    return lambda instruction: instruction.name in names


def _copies_in_ptx(instruction: Instruction) -> bool:
    return "::complete_tx" in instruction.code or instruction.code.startswith(ASYNC_COPIES)


def _fences(instruction: Instruction) -> bool:
    return instruction.code.startswith("FENCE.VIEW.ASYNC")


def _arrives(instruction: Instruction) -> bool:
    # Arrivals that announce bytes (no A1T0) are those of the copying warps themselves.
    return instruction.code.startswith("SYNCS.ARRIVE") and "A1T0" in instruction.code


def _codes(instructions: list[Instruction]) -> Counter[str]:
    return Counter(instruction.code for instruction in instructions)


def _constants(ptx: Flow) -> dict[str, tuple[int, int]]:
    """Registers that hold one constant all along, with the threads of a warpgroup that hold it.

    `mov.b32 %r, c` is for all, `selp.b32 %r, c, 0, %p` for the one thread whose predicate is set.
    """
    found: dict[str, set[tuple[int, int] | None]] = {}
    for block in ptx.order:
        for instruction in ptx.blocks[block]:
            register, *values = instruction.operands.replace(" ", "").split(",")
            numbers = [int(v) for v in values if v.isdecimal()]
            constant = None
            if instruction.name == "mov" and len(values) == len(numbers) == 1:
                constant = (numbers[0], WARPGROUP)
            elif instruction.name == "selp" and len(numbers) == 2 and numbers[1] == 0:
                constant = (numbers[0], 1)
            found.setdefault(register, set()).add(constant)
    return {
        register: constant
        for register, (constant, *others) in found.items()
        if constant is not None and not others
    }


def _bytes(instruction: Instruction, constants: dict[str, tuple[int, int]]) -> int:
    """Bytes that a warpgroup copies, or has a barrier expect, by this instruction."""
    *_, last = (operand.strip() for operand in instruction.operands.split(","))
    if instruction.code.startswith(ASYNC_COPIES):
        return int(last) * WARPGROUP
    if ".expect_tx." not in instruction.code:
        return 0
    if not last.isdecimal() and last not in constants:
        raise ValueError(f"a barrier expects {last} bytes, which is not a constant")
    nbytes, threads = (int(last), WARPGROUP) if last.isdecimal() else constants[last]
    return nbytes * (threads if instruction.guard is None else 1)

"""Calls with a fault each, which the checker has to find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernel_check.calls import (
    Call,
    array,
    changed_plans,
    compile_call,
    decode_call,
    multiplied_by,
)
from kernel_check.cases import ROWS, SLOTS, STORAGES, UNITS, Case, StepCase, Storage
from kernel_check.checking import Checked, check_call, check_program
from kernel_check.steps import step_call
from kvjax.kernels.mosaic_gpu import attending, copying, cp_async, launch
from kvjax.kernels.mosaic_gpu.plan import Plan

BF16 = STORAGES[0]
INT8 = next(s for s in STORAGES if s.dtype == "int8" and s.scales == "K")

# Of a target, and the directory of the dumps.
Maker = Callable[[str, Path], Checked]


class Changed:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, **functions: Callable[..., Any]):
        self._module, self._functions = module, functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(self._module, name)


@contextlib.contextmanager
def changed(user: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile, a module of the kernels finds these functions in plgpu."""
    with mock.patch.object(user, "plgpu", Changed(plgpu, **functions)):
        yield


def planned(case: Case, change: Callable[[Plan], Plan]) -> Maker:
    """The call of a case with its plan changed."""

    def check(target: str, dump: Path) -> Checked:
        with multiplied_by(case.unit or UNITS[target]), changed_plans(change):
            return check_call(decode_call(case), target, dump, case.page)

    return check


def mutated(case: Case, *users: Any, **functions: Callable[..., Any]) -> Maker:
    """The call of a case with functions of plgpu changed in some modules of the kernels."""

    def check(target: str, dump: Path) -> Checked:
        with contextlib.ExitStack() as stack:
            stack.enter_context(multiplied_by(case.unit or UNITS[target]))
            for user in users:
                stack.enter_context(changed(user, **functions))
            return check_call(decode_call(case), target, dump, case.page)

    return check


def load_through_registers(source: Any, target: Any, barrier: Any = None, **_: Any) -> None:
    """In place of a copy past them."""
    target[...] = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
    if barrier is not None:
        plgpu.barrier_arrive(barrier)


def no_barriers(**given: Any) -> plgpu.CompilerParams:
    """Settings by which the compiler adds no barriers around accesses to shared memory."""
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, **given)


def copy_twice(source: Any, target: Any, barrier: Any) -> None:
    """In place of one copy."""
    for _ in range(2):
        plgpu.copy_gmem_to_smem(source, target, barrier)


def attention_by_tokens(target: str, dump: Path) -> Checked:
    """JAX's own attention, on a cache (B, S, K, H)."""
    cache = array((ROWS, SLOTS, 8, 128), "bfloat16")
    arguments = (array((ROWS, 1, 64, 128), "bfloat16"), cache, cache, array((ROWS,), "int32"))

    def function(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)

    return checked_program(Call(function, arguments, caches=(1, 2)), target)


def step_without_donation(target: str, dump: Path) -> Checked:
    """A step whose cache is still the caller's afterwards, and has to be copied."""
    return checked_program(step_call(StepCase("bf16", None), SLOTS, donate=False), target)


def checked_program(call: Call, target: str) -> Checked:
    """The faults of a program beside its kernels, whatever its temporaries."""
    return Checked({}, [*check_program(call, compile_call(call, target), most=2**40)])


def of(unit: str, storage: Storage, dim: int, group: int = 8, page: int | None = None) -> Case:
    """A case with heads as wide in keys as in values."""
    return Case(unit, storage, (dim, dim), group, page)


# An empty unit is the target's own.
MAKERS: dict[str, Maker] = {
    "a plan with too many heads": planned(
        of("", BF16, 256, 64), lambda plan: replace(plan, heads=64, stages=1)
    ),
    "too many tiles in flight": planned(
        of("", BF16, 128), lambda plan: replace(plan, stages=8, residents=1)
    ),
    "more residents than fit": planned(of("", BF16, 256), lambda plan: replace(plan, residents=2)),
    "wgmma on a GPU without it": planned(of("wgmma", BF16, 128), lambda plan: plan),
    "no fence before a product": mutated(
        of("wgmma", BF16, 128), attending, commit_smem=lambda: None
    ),
    "no fence before a stage is given back": mutated(
        of("mma", INT8, 128), attending, commit_smem=lambda: None
    ),
    "no barriers but those asked for": mutated(
        of("", BF16, 128), launch, CompilerParams=no_barriers
    ),
    "tiles loaded through registers": mutated(
        of("", BF16, 128, page=64), copying, cp_async, copy_gmem_to_smem=load_through_registers
    ),
    "every tile copied twice": mutated(
        of("wgmma", BF16, 64), copying, copy_gmem_to_smem=copy_twice
    ),
    "XLA's attention on a cache by tokens": attention_by_tokens,
    "a step that does not donate its cache": step_without_donation,
}

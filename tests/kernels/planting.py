"""What plants faults in kernels, and finds those that a simulation does not see."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from jax._src.core import jaxprs_in_params
from jax.experimental.pallas import mosaic_gpu as plgpu

# What the simulation says of a race, and of a barrier that was completed once more than it was
# waited for.
SIGNS = ("RACE DETECTED", "no threads observed", "had only observed barrier")


def api(**changed) -> SimpleNamespace:
    """The kernel's vocabulary with some of its functions replaced."""
    names = {name: getattr(plgpu, name) for name in dir(plgpu) if not name.startswith("__")}
    return SimpleNamespace(**names | changed)


def changed(module, name, put):
    """Replaces what `module` has by that name with what `put` makes of it."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, put(getattr(module, name)))


def known_barriers(monkeypatch, module) -> Callable[[Any, str], bool]:
    """Gives whether a reference is one of a block's barriers of that name, once it is traced.

    "k_full[2]" names one of several.
    """
    seen: dict[str, Any] = {}
    block = module._block

    def watched(settings, inputs, outputs, scratch):
        for name, barriers in scratch._asdict().items():
            parts = barriers if isinstance(barriers, tuple) else ()
            seen.update({name: barriers} | {f"{name}[{i}]": part for i, part in enumerate(parts)})
        block(settings, inputs, outputs, scratch)

    monkeypatch.setattr(module, "_block", watched)
    return lambda reference, name: getattr(reference, "ref", reference) is seen[name]


def without_wait(module, name, blocks):
    """`module` does not wait for the barriers of that name; `blocks` has the block's function."""

    def plant(monkeypatch) -> None:
        is_named = known_barriers(monkeypatch, blocks)

        def wait(barrier):
            if not is_named(barrier, name):
                plgpu.barrier_wait(barrier)

        monkeypatch.setattr(module, "plgpu", api(barrier_wait=wait))

    return plant


def next_page(old):
    """Of `copying._page`: the page behind the one that is asked for."""
    return lambda settings, inputs, span, row, entry: old(settings, inputs, span, row, entry + 1)


def raised_what_it_must(error: Exception) -> bool:
    """Whether a simulation's error, whose own type is lost, is of a kind that tells of a fault."""
    return any(sign in str(error) for sign in SIGNS)


def handed_on_unfenced(jaxpr, stored: bool = False) -> tuple[int, bool]:
    """How often something stored in shared memory is handed on without a fence.

    To the matrix unit, or to another warpgroup. And whether something is left unfenced.
    """
    faults = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "swap" and equation.invars[0].aval.memory_space == plgpu.SMEM:
            stored = True
        elif name == "commit_smem":
            stored = False
        elif name in ("wgmma_ref", "barrier_arrive"):
            faults += stored
        for inner in jaxprs_in_params(equation.params):
            more, stored = handed_on_unfenced(inner, stored)
            faults += more
    return faults, stored

"""Whole programs, as XLA leaves them: what makes arrays as large as a cache."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(\w+)=\{?(%[^\s,}]+(?:, ?%[^\s,}]+)*)\}?")

# What has a result without making one: it is an operand's memory, or a part of it.
VIEWS = (
    "bitcast",
    "conditional",
    "call",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
    "while",
)
# Kernels, whose results are what they leave to be merged.
KERNEL = "mosaic_gpu"
# What writes into its first operand's memory.
UPDATES = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True)
class Operation:
    """One instruction of a program.

    Attributes:
      name, opcode: as XLA gives them.
      largest: bytes of the largest array of its result.
      operands: names.
      called: computations, by the attribute that names them.
      target: what a custom call calls.
      root: whether it is its computation's result.
    """

    name: str
    opcode: str
    largest: int
    operands: tuple[str, ...]
    called: dict[str, tuple[str, ...]]
    target: str
    root: bool


def read_hlo(text: str) -> tuple[str, dict[str, list[Operation]]]:
    """The name of the entry, and all computations by name.

    Raises:
      ValueError: if there is no entry.
    """
    computations: dict[str, list[Operation]] = {}
    entry = name = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            computations[name].append(_operation(match[2], match[3], bool(match[1])))
        elif line.startswith("}"):
            name = None
    if entry is None:
        raise ValueError("the program has no entry")
    return entry, computations


def _operation(name: str, text: str, root: bool) -> Operation:
    shape, rest = _cut_shape(text)
    opcode, _, behind = rest.partition("(")
    # Operands hold no parentheses of their own, but for constants.
    operands, _, attributes = behind.partition(")")
    called = {key: _names(value) for key, value in _CALLED.findall(attributes)}
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    return Operation(
        name=name,
        opcode=opcode.strip(),
        largest=_largest(shape),
        operands=_names(operands),
        called=called,
        target=target[1] if target else "",
        root=root,
    )


def _cut_shape(text: str) -> tuple[str, str]:
    """A result's shape, which may be a tuple, and what follows."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: i + 1], text[i + 2 :]
    raise ValueError(f"a shape without an end: {text[:80]}")


def _largest(shape: str) -> int:
    """Bytes of the largest array in a shape."""
    sizes = [0]
    for kind, bits, axes in _ARRAY.findall(shape):
        elements = math.prod(int(axis) for axis in axes.split(",") if axis)
        sizes.append(-(-elements * (8 if kind == "pred" else int(bits)) // 8))
    return max(sizes)


def _names(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"%([^\s,()]+)", text))


def large_results(text: str, nbytes: int) -> list[str]:
    """Operations that make an array of so many bytes or more anew, as "opcode name".

    A fusion that ends in an update writes in place: it would have a copy before it otherwise.
    """
    entry, computations = read_hlo(text)
    found, todo, seen = [], [entry], {entry}
    while todo:
        for operation in computations[todo.pop()]:
            for key, names in operation.called.items():
                if key in ("calls", "to_apply") and operation.opcode not in ("call", "async-start"):
                    continue
                todo += [name for name in names if name in computations and name not in seen]
                seen.update(names)
            if operation.largest >= nbytes and _makes(operation, computations, nbytes):
                found.append(f"{operation.opcode} {operation.name}")
    return found


def _makes(operation: Operation, computations: dict[str, list[Operation]], nbytes: int) -> bool:
    if operation.opcode in (*VIEWS, *UPDATES) or operation.target.startswith(KERNEL):
        return False
    if operation.opcode != "fusion":
        return True
    body = {o.name: o for o in computations[operation.called["calls"][0]]}
    root = next(o for o in body.values() if o.root)
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return not all(_updates(result, body) for result in results if result.largest >= nbytes)


def _updates(result: Operation, body: dict[str, Operation]) -> bool:
    while result.opcode == "bitcast":
        result = body[result.operands[0]]
    return result.opcode in UPDATES


def kernel_calls(text: str) -> int:
    """Calls of Pallas kernels in all computations."""
    return len(re.findall(rf'custom_call_target="{KERNEL}', text))

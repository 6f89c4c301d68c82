"""SASS and PTX listings, read into instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Mosaic's dump has control codes before the address: `1:-:-:Y:05  /*4560*/  @!P2 BRA ...`.
_SASS = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<code>[A-Z][\w.]*)(?P<rest>.*)"
)
_SASS_LABEL = re.compile(r"(\.L_x_\w+):")
_SASS_TARGET = re.compile(r"`\((\.L_x_\w+)\)")
_PTX = re.compile(r"(?:@(?P<guard>!?%?\w+)\s+)?(?P<code>[a-z][\w.:]*)(?P<rest>.*)", re.DOTALL)
_PTX_LABEL = re.compile(r"(\$?\w+):(?!:)")
_PTX_SKIPPED = re.compile(r"\.|//|$")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      code: its name with all modifiers, such as LDG.E.64 or ld.global.b32.
      operands: the text behind it.
      guard: the predicate that it depends on, or None.
      labels: those that stand before it.
      target: label that it may jump to, or None.
    """

    code: str
    operands: str = ""
    guard: str | None = None
    labels: tuple[str, ...] = ()
    target: str | None = None

    @property
    def name(self) -> str:
        """Without modifiers."""
        return self.code.split(".")[0]

    @property
    def leaves(self) -> bool:
        """Whether the program ends here."""
        return self.name in ("EXIT", "RET", "ret", "exit", "trap")

    @property
    def conditional(self) -> bool:
        """Whether the next instruction may follow, although this one jumps or leaves."""
        # `BRA P3, label` has a second predicate among its operands.
        return self.guard is not None or bool(re.match(r"\s*!?U?P\d", self.operands))


def read_sass(text: str) -> list[Instruction]:
    """The instructions of the only function of nvdisasm's output, without the filling at its end.

    Raises:
      ValueError: if there are none, or of more functions than one.
    """
    if (functions := len(re.findall(r"^\s*\.type\s.*@function", text, re.MULTILINE))) > 1:
        raise ValueError(f"{functions} functions in one listing")
    found: list[Instruction] = []
    labels: list[str] = []
    for line in text.splitlines():
        if match := _SASS_LABEL.match(line):
            labels.append(match[1])
        elif match := _SASS.search(line):
            if match["guard"] == "!PT":  # never; ptxas puts some before LDGSTS
                continue
            jump = _SASS_TARGET.search(match["rest"])
            target = jump[1] if jump and match["code"].startswith("BRA") else None
            found.append(
                Instruction(
                    match["code"], match["rest"].strip(" ;"), match["guard"], tuple(labels), target
                )
            )
            labels = []
    while found and found[-1].code == "NOP":
        found.pop()
    if not found:
        raise ValueError("no instruction in the listing")
    return found


def read_ptx(text: str) -> list[Instruction]:
    """The instructions of the only entry of a PTX module.

    Inline assembly has labels of its own between braces, which may recur.

    Raises:
      ValueError: if there is none, or more than one.
    """
    bodies = text.split(".entry ")[1:]
    if len(bodies) != 1:
        raise ValueError(f"{len(bodies)} entries in one module")
    found: list[Instruction] = []
    labels: list[str] = []
    scopes: list[int] = []
    for scope, piece in enumerate(_pieces(bodies[0][bodies[0].index("{") :])):
        if piece == "{":
            scopes.append(scope)
        elif piece == "}":
            scopes.pop()
        elif match := _PTX_LABEL.fullmatch(piece):
            labels.append(_scoped(match[1], scopes))
        elif match := _PTX.fullmatch(piece):
            code, rest = match["code"], match["rest"].strip()
            target = _scoped(rest, scopes) if code.split(".")[0] == "bra" else None
            found.append(Instruction(code, rest, match["guard"], tuple(labels), target))
            labels = []
    if labels:
        found.append(Instruction("ret", labels=tuple(labels)))
    return found


def _scoped(label: str, scopes: list[int]) -> str:
    return label if label.startswith("$") else f"{label}@{scopes[-1]}"


def _pieces(body: str) -> Iterator[str]:
    """Labels, braces that open or close a scope, and instructions without their semicolons."""
    open_scopes = 0
    for line in body.splitlines():
        line = line.strip()
        while line and not _PTX_SKIPPED.match(line):
            if line[0] in "{}":
                open_scopes += 1 if line[0] == "{" else -1
                yield line[0]
                if not open_scopes:
                    return
                line = line[1:].strip()
            elif match := _PTX_LABEL.match(line):
                yield match[0]
                line = line[match.end() :].strip()
            else:
                piece, _, line = line.partition(";")
                yield piece.strip()
                line = line.strip()
            # Declarations of registers, within a line of inline assembly.
            while line.startswith("."):
                line = line.partition(";")[2].strip()

"""How control flows through a listing: blocks, loops, ways through them, and what holds on all."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kernel_check.listing import Instruction


@dataclass(frozen=True)
class Loop:
    """A natural loop: its first block, all its blocks, and those that jump back to the first."""

    head: int
    blocks: frozenset[int]
    backs: frozenset[int]


class Flow:
    """The control flow of a program.

    Attributes:
      blocks: instructions without a jump into or out of their midst.
      after: for each block, those that may follow.
    """

    def __init__(self, program: Iterable[Instruction]):
        self.blocks: list[list[Instruction]] = [[]]
        for instruction in program:
            if instruction.labels and self.blocks[-1]:
                self.blocks.append([])
            self.blocks[-1].append(instruction)
            if instruction.target or instruction.leaves:
                self.blocks.append([])
        if not self.blocks[-1]:
            self.blocks.pop()
        place = {label: i for i, block in enumerate(self.blocks) for label in block[0].labels}
        self.after = [[*self._after(i, place)] for i in range(len(self.blocks))]

    def _after(self, i: int, place: dict[str, int]) -> Iterator[int]:
        last = self.blocks[i][-1]
        if last.target is not None:
            yield place[last.target]
        goes_on = (last.target is None and not last.leaves) or last.conditional
        if goes_on and i + 1 < len(self.blocks):
            yield i + 1

    @cached_property
    def order(self) -> list[int]:
        """Blocks that are reached, each before those that follow, but for jumps back."""
        seen, found = {0}, []
        stack = [(0, iter(self.after[0]))]
        while stack:
            block, rest = stack[-1]
            following = next((b for b in rest if b not in seen), None)
            if following is None:
                found.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.after[following])))
        return found[::-1]

    @cached_property
    def before(self) -> dict[int, list[int]]:
        """For each block that is reached, those that it may follow."""
        found: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for following in self.after[block]:
                found[following].append(block)
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """The natural loops, smallest first."""
        backs: dict[int, set[int]] = {}
        for block in self.order:
            for head in self.after[block]:
                if head in self._dominators[block]:
                    backs.setdefault(head, set()).add(block)
        loops = []
        for head, sources in backs.items():
            inside, todo = {head}, [*sources]
            while todo:
                block = todo.pop()
                if block not in inside:
                    inside.add(block)
                    todo += self.before[block]
            loops.append(Loop(head, frozenset(inside), frozenset(sources)))
        return sorted(loops, key=lambda loop: len(loop.blocks))

    @cached_property
    def _dominators(self) -> dict[int, frozenset[int]]:
        """For each block, those that lie on every way to it."""
        every = frozenset(self.order)
        found = dict.fromkeys(self.order, every) | {0: frozenset({0})}
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                sets = [found[b] for b in self.before[block]]
                new = frozenset.intersection(*sets) | {block}
                changed |= new != found[block]
                found[block] = new
        return found

    def instructions(self, loop: Loop) -> list[Instruction]:
        """All of a loop."""
        return [i for block in sorted(loop.blocks) for i in self.blocks[block]]

    def loops_with(self, wanted: Callable[[Instruction], bool]) -> list[Loop]:
        """For all instructions of a kind that lie in loops, the innermost ones."""
        found: list[Loop] = []
        for block in self.order:
            if any(map(wanted, self.blocks[block])):
                inner = next((loop for loop in self.loops if block in loop.blocks), None)
                if inner is not None and inner not in found:
                    found.append(inner)
        return found

    def shortest_way(self, loop: Loop, through: Callable[[Instruction], bool]) -> int:
        """Instructions of the shortest way round a loop past all its instructions of a kind.

        It is the way taken where no barrier has to be waited for and nothing rare happens.
        """
        stops = [
            b
            for b in self.order
            if b in loop.blocks and b != loop.head and any(map(through, self.blocks[b]))
        ]
        length, here = len(self.blocks[loop.head]), loop.head
        for stop in stops:
            length += self._distance(loop, here, frozenset({stop}))
            here = stop
        return length + self._distance(loop, here, loop.backs)

    def _distance(self, loop: Loop, start: int, ends: frozenset[int]) -> int:
        """Instructions behind block `start` up to the end of the nearest of `ends`."""
        queue, seen = [(0, start)], set()
        while queue:
            length, block = heapq.heappop(queue)
            if block in ends:
                return length
            if block in seen:
                continue
            seen.add(block)
            for b in self.after[block]:
                if b in loop.blocks and b != loop.head:
                    heapq.heappush(queue, (length + len(self.blocks[b]), b))
        raise ValueError("the loop's blocks are not on one way round it")

    def reached(
        self,
        sets: Callable[[Instruction], bool],
        clears: Callable[[Instruction], bool],
        reads: Callable[[Instruction], bool],
    ) -> list[Instruction]:
        """Instructions that read, on some way behind one that sets, before one that clears."""

        def run(block: int, state: bool, found: list[Instruction]) -> bool:
            for instruction in self.blocks[block]:
                if state and reads(instruction):
                    found.append(instruction)
                if sets(instruction):
                    state = True
                elif clears(instruction) and instruction.guard is None:
                    state = False
            return state

        entering = dict.fromkeys(self.order, False)
        todo = [*self.order]
        while todo:
            block = todo.pop(0)
            leaving = run(block, entering[block], [])
            for following in self.after[block]:
                if leaving and not entering[following]:
                    entering[following] = True
                    todo.append(following)
        found: list[Instruction] = []
        for block in self.order:
            run(block, entering[block], found)
        return found

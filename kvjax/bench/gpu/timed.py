"""Timing the points of a sweep: contenders and a device copy in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array

from kvjax.bench import machine, result
from kvjax.bench.bandwidth import Bandwidth, Probe
from kvjax.bench.gpu import chained, presets
from kvjax.bench.gpu.chained import Chain
from kvjax.bench.gpu.checks import plain
from kvjax.bench.gpu.oracle import Difference, difference, tolerance
from kvjax.bench.gpu.peers import JaxPeer, is_torch, jax_peer, torch_peer
from kvjax.bench.gpu.presets import Point
from kvjax.bench.gpu.shape import Operands, compile_operands, operands, queries
from kvjax.bench.timing import Sampler, Timing, interleave, time_calls
from kvjax.sizing.roofline import Chip

ROUNDS = 7
# By which chains are planned where the chip is not known.
USUAL_BANDWIDTH = 1e12
# What programs and their outputs take beside caches.
SPARE_BYTES = 2**30

type Row = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """One that is ready to be timed.

    Attributes:
      sample: seconds of so many programs.
      chain: of a program.
      far: its first output from float64, in the heads that were looked at.
    """

    sample: Sampler
    chain: Chain
    far: Difference


@dataclass(frozen=True)
class Bench:
    """What points are timed with.

    Attributes:
      copy: the device copy.
      chip: for its peaks; None if they are not known.
      tiny: whether chains are as short as can be.
      ahead: programs that are compiled, or being compiled, before their point is timed.
    """

    copy: Probe
    chip: Chip | None
    tiny: bool = False
    ahead: dict[tuple[Point, str], Future[tuple[JaxPeer, Any]]] = field(default_factory=dict)

    def chain(self, point: Point) -> Chain:
        """How a point's calls are chained."""
        rate = USUAL_BANDWIDTH if self.chip is None else self.chip.bytes_per_second
        planned = chained.plan(point.shape.bytes_per_step, rate, point.copies)
        return Chain(2, 1) if self.tiny and planned.laps else planned

    def builds(self, points: Sequence[Point]) -> dict[tuple[Point, str], Callable[[], Any]]:
        """What compiles the programs of some points; results may be put into `ahead`."""
        return {
            (point, name): partial(self._compiled, point, name)
            for point in points
            for name in point.contenders
            if not is_torch(name)
        }

    def rows(self, point: Point) -> Iterator[Row]:
        """A row for each contender of a point; one that cannot take part has an error instead."""
        shape, chain = point.shape, self.chain(point)
        about = {
            "sweep": point.sweep,
            "point": point.name,
            "label": presets.label(shape),
            "kernel": presets.kernel(shape),
            "copies": chain.copies,
            "working_set_bytes": chain.copies * shape.bytes_per_step,
        }
        if (says := self._no_room(point)) is not None:
            yield from ({"contender": name, **about, "error": says} for name in point.contenders)
            return
        q = queries(shape)
        caches = tuple(operands(shape, seed) for seed in range(chain.copies))
        ready: dict[str, Contender] = {}
        for name in point.contenders:
            try:
                ready[name] = self._contender(point, name, q, caches)
            except Exception as error:
                yield {"contender": name, **about, "error": says_error(error)}
        samplers = {name: one.sample for name, one in ready.items()}
        timings = interleave({"copy": self.copy, **samplers}, ROUNDS)
        for name, one in ready.items():
            yield {
                **self._figures(point, name, one.chain.per_call(timings[name]), timings),
                **about,
                "difference": plain(one.far)["out"],
                "agrees": one.far.within(tolerance(shape)),
            }

    def _compiled(self, point: Point, name: str) -> tuple[JaxPeer, Any]:
        """A contender and its program."""
        peer, chain = jax_peer(name, point.shape), self.chain(point)
        compile_operands(point.shape)
        q = jax.eval_shape(partial(queries, point.shape))
        one = jax.eval_shape(partial(operands, point.shape))
        if peer.prepare is not None:
            one = jax.eval_shape(peer.prepare, one)
        program = jax.jit(chain.program(peer.step))
        return peer, program.lower(q, (one,) * chain.copies).compile()

    def _contender(
        self, point: Point, name: str, q: Array, caches: tuple[Operands, ...]
    ) -> Contender:
        shape, chain = point.shape, self.chain(point)
        heads = {(0, 0), (shape.batch - 1, shape.kv_heads - 1)}

        def far(output: Any) -> Difference:
            return difference(shape, q, caches[0], output, heads=heads)

        if is_torch(name):
            sample, output = torch_peer(name, shape, q, caches)
            # A pass over all copies is a program, without a first call of its own.
            return Contender(sample, Chain(1, chain.copies - 1), far(output))
        ahead = self.ahead.pop((point, name), None)
        peer, program = self._compiled(point, name) if ahead is None else ahead.result()
        given = caches if peer.prepare is None else tuple(map(peer.prepare, caches))
        first, _ = program(q, given)
        return Contender(partial(time_calls, lambda: program(q, given)), chain, far(first))

    def _figures(self, point: Point, name: str, timing: Timing, timings: dict[str, Timing]) -> Row:
        """As `result.row`, with the matrix peak among the ceilings if it is known."""
        shape = point.shape
        nbytes, flop = shape.bytes_per_step, shape.flop_per_step
        bandwidth = Bandwidth.of({"copy": self.copy}, timings)
        row = result.row(name, asdict(shape), nbytes, flop, timing, bandwidth)
        rate, peak = flop / timing.median, None if self.chip is None else self.chip.bf16_flops
        floor = max(nbytes / bandwidth.best, 0 if peak is None else flop / peak)
        return row | {
            "copy_bytes_per_second": bandwidth.best,
            "flop_per_second": rate,
            "share_of_matrix_peak": None if peak is None else rate / peak,
            "floor_seconds": floor,
            "share_of_floor": floor / timing.median,
        }

    def _no_room(self, point: Point) -> str | None:
        """Why a point does not fit the memory; None if it does."""
        # cuDNN's caches lie token-major, beside this library's.
        layouts = 1 + ("jax cudnn" in point.contenders)
        needed = point.shape.allocated_bytes * self.chain(point).copies * layouts + SPARE_BYTES
        free = machine.free_bytes()
        if free is None or needed <= free:
            return None
        return f"skipped: it needs {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"


def says_error(error: Exception) -> str:
    """An exception in a few lines."""
    return f"{type(error).__name__}: {error}"[:2000]

"""Decode attention alone: this library and its peers, over one shape or many, in one run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from kvjax.bench import machine, result
from kvjax.bench.bandwidth import ARRAY_BYTES, Bandwidth, probes
from kvjax.bench.case import Case, Inputs
from kvjax.bench.peers import BUILDERS, AbsentError, Contender
from kvjax.bench.timing import Timing, interleave
from kvjax.bench.torch_peer import TorchWorker

CONTENDERS = (*BUILDERS, "torch")

# Largest difference between two outputs as a share of the largest element. Contenders may round
# scores and weights to the dtype of the codec on their way.
TOLERANCES = {"f32": 1e-4, "bf16": 0.05, "f16": 0.02}


def measure(
    plan: Mapping[Case, Sequence[str]],
    *,
    rounds: int = 7,
    seed: int = 0,
    torch_python: str | None = None,
    array_bytes: int = ARRAY_BYTES,
    on_round: Callable[[int], Any] | None = None,
) -> dict[str, Any]:
    """Time the contenders of every case, all of them in turn in each round.

    Everything is in memory at once, each contender with arrays of its own. Contenders whose outputs
    differ are an error, found before anything is timed.

    Args:
      plan: the contenders of each case, names in `CONTENDERS`.
      rounds: samples of each.
      seed: of the numbers and the orders.
      torch_python: an interpreter that has torch; None for the one that runs this.
      array_bytes: size of the arrays that the machine's bandwidth is measured on.
      on_round: called with 1 after each round.

    Returns:
      As `result.collect`. In each row `seconds_over_kvjax` is its median over this library's of the
      same case, None where that did not run.

    Raises:
      ValueError: for unknown contenders, or cases that do not fit the memory.
    """
    _check(plan, array_bytes)
    absent: dict[str, str] = {}
    moves = probes(array_bytes)
    with closing(TorchWorker(torch_python)) as torch:
        builders = {**BUILDERS, "torch": torch.contender}
        contenders: dict[tuple[Case, str], Contender] = {}
        for case, names in plan.items():
            inputs = Inputs(case, seed)
            for name in names:
                try:
                    contenders[case, name] = builders[name](case, inputs)
                except AbsentError as error:
                    absent[name] = str(error)
        _compare_outputs(contenders)
        samplers = {key: contender.sample for key, contender in contenders.items()}
        timings = interleave({**samplers, **moves}, rounds, seed=seed, on_round=on_round)
    bandwidth = Bandwidth.of(moves, timings)
    rows = [
        result.row(
            name,
            asdict(case),
            case.bytes_per_step,
            case.flop_per_step,
            timings[case, name],
            bandwidth,
        )
        | {"seconds_over_kvjax": _over_kvjax(timings, case, name)}
        for case, name in contenders
    ]
    figures = result.collect(
        "decode attention", rows, bandwidth, {"rounds": rounds, "seed": seed}, absent
    )
    if torch.version is not None:
        figures["machine"]["versions"]["torch"] = torch.version
    return figures


def _check(plan: Mapping[Case, Sequence[str]], array_bytes: int) -> None:
    if not plan:
        raise ValueError("no cases: at least one is needed")
    for name in {name for names in plan.values() for name in names}:
        if name not in CONTENDERS:
            raise ValueError(f"peer {name!r}: accepted are {', '.join(CONTENDERS)}")
    needed = sum(case.allocated_bytes * len(names) for case, names in plan.items())
    machine.check_memory(needed + 3 * array_bytes, "the caches of every case and contender")


def _compare_outputs(contenders: Mapping[tuple[Case, str], Contender]) -> None:
    """RuntimeError where two contenders of a case disagree."""
    by_case: dict[Case, dict[str, np.ndarray]] = defaultdict(dict)
    for (case, name), contender in contenders.items():
        by_case[case][name] = contender.output
    for case, outputs in by_case.items():
        first, expected = next(iter(outputs.items()))
        for name, output in outputs.items():
            differs = float(np.abs(output - expected).max() / np.abs(expected).max())
            # Written so that NaN fails.
            if not differs <= TOLERANCES[case.codec]:
                raise RuntimeError(
                    f"{name} and {first} differ by {differs:.2g} of the largest output in {case}: "
                    "they do not compute the same"
                )


def _over_kvjax(timings: Mapping[Any, Timing], case: Case, name: str) -> float | None:
    ours = timings.get((case, "kvjax"))
    return None if ours is None else timings[case, name].median / ours.median

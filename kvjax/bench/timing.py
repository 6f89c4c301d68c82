"""Timing that a busy machine cannot bend: many rounds, in each of them every contender once.

No figure comes from a single run. Contenders take turns in an order shuffled anew in each round, so
that drift (clocks, temperature, other processes) falls on all of them alike, and the ratio of two
medians means more than either median.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

# Runs that many calls in a row and returns the seconds of all of them together.
type Sampler = Callable[[int], float]

LEAST_ROUNDS = 3
# A sample takes as many calls as fill this time, so that clocks and waiting weigh little in it.
SAMPLE_SECONDS = 0.02
MOST_CALLS = 1000
# Before each sample: threads of the contender before may spin for a while after their work.
PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one sample a round.

    Attributes:
      calls: calls that each sample is the mean of.
      samples: seconds a call, in the order of the rounds.
    """

    calls: int
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper one."""
        lower, _, upper = statistics.quantiles(self.samples, n=4, method="inclusive")
        return lower, upper


def time_calls(
    step: Callable[[], Any], calls: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of `calls` calls of `step`, which returns arrays.

    An accelerator works through its queue in order, so there the calls are queued and waited for
    once: what is timed is the device, as long as a call takes longer than its dispatch. On a CPU
    queued calls would run side by side, so each is waited for.
    """
    wait_each = jax.default_backend() == "cpu"
    start = clock()
    for _ in range(calls):
        out = step()
        if wait_each:
            jax.block_until_ready(out)
    jax.block_until_ready(out)
    return clock() - start


def interleave[Key: Hashable](
    samplers: Mapping[Key, Sampler],
    rounds: int,
    *,
    seed: int = 0,
    pause: float = PAUSE_SECONDS,
    on_round: Callable[[int], Any] | None = None,
) -> dict[Key, Timing]:
    """Warm every contender up, then sample each of them once in each of `rounds` rounds.

    Args:
      samplers: the contenders.
      rounds: at least 3.
      seed: of the orders.
      pause: seconds of rest before each sample.
      on_round: called with 1 after each round, for a progress bar.
    """
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"rounds={rounds}: at least {LEAST_ROUNDS} are needed for a spread")
    calls = {key: _warm_up(sampler) for key, sampler in samplers.items()}
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    order = list(samplers)
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for key in order:
            time.sleep(pause)
            samples[key].append(samplers[key](calls[key]) / calls[key])
        if on_round is not None:
            on_round(1)
    return {key: Timing(calls[key], tuple(samples[key])) for key in samplers}


def _warm_up(sampler: Sampler) -> int:
    """Compile and touch everything, then say how many calls fill a sample."""
    sampler(1)
    quickest = min(sampler(1) for _ in range(3))
    return max(1, min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / quickest)))

"""How a budget of slots is spread over the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


class Budgets(Protocol):
    """Hashable, hence static under jit."""

    def __call__(self, layers: int, tokens: int, budget: int, recent: int) -> tuple[int, ...]:
        """Slots of each layer; `budget` is their mean where no layer has less to keep.

        Args:
          layers: how many share.
          tokens: that the longest row has seen.
          budget: slots a layer, less than `tokens`.
          recent: tokens that every layer keeps whatever they score, counted in its budget.

        Raises:
          ValueError: the budget cannot be spread so.
        """
        ...


@dataclass(frozen=True)
class Uniform:
    """The same for every layer."""

    def __call__(self, layers: int, tokens: int, budget: int, recent: int) -> tuple[int, ...]:
        return (budget,) * layers


@dataclass(frozen=True)
class Pyramid:
    """Less the higher the layer, in equal steps (PyramidKV, arXiv:2406.02069).

    The last layer gets budget / beta, and the first as much above the mean. Where that is more than
    layers have to choose from, the first gets all of it and the last more; where even the mean is,
    all get the same.
    """

    beta: float = 20.0

    def __call__(self, layers: int, tokens: int, budget: int, recent: int) -> tuple[int, ...]:
        low = budget / self.beta
        high = 2 * budget - low
        if high >= tokens - recent:
            high = float(tokens - recent)
            low = 2 * budget - high
        if low < recent:
            raise ValueError(
                f"budget: got {budget}, of which the last layer gets {low:g} slots; accepted: "
                f"budgets of which it gets at least the {recent} that are protected"
            )
        if layers == 1 or low > high:
            return (budget,) * layers
        step = (high - low) / (layers - 1)
        # Rounded as running sums, so that all together are the whole budget.
        ends = [round(i * high - step * i * (i - 1) / 2) for i in range(layers + 1)]
        return tuple(end - start for start, end in pairwise(ends))

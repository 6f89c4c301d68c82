"""How a cache is laid out, spread over devices, and by whose rules; and what it holds."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from kvjax.sizing import hf_caches
from kvjax.sizing.checks import is_amount, whole
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.layouts import Kept, LayoutSpec, layout_of

DEFINITIONS = ("kvjax", *hf_caches.DEFINITIONS)

# B; or what share of the length each sequence of a mix has.
type Batch = int | Sequence[float]


class Placing(TypedDict):
    """Keyword arguments of `ModelSpec.cache_bytes` that say where and how a cache is kept."""

    page_size: NotRequired[int | None]
    tp: NotRequired[int]
    pp: NotRequired[int]
    dp: NotRequired[int]
    source_tokens: NotRequired[int]
    in_flight: NotRequired[int]
    ring_multiple: NotRequired[int]
    kept: NotRequired[Kept | None]
    definition: NotRequired[str]


@dataclass(frozen=True)
class Placement:
    """How a cache is laid out and spread over devices, and by whom; checked once.

    The fields are the keyword arguments of `ModelSpec.cache_bytes`.
    """

    page_size: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    source_tokens: int = 0
    in_flight: int = 1
    ring_multiple: int = 1
    kept: Kept | None = None
    definition: str = "kvjax"

    def __post_init__(self) -> None:
        counts = {"source_tokens": 0, "tp": 1, "pp": 1, "dp": 1, "in_flight": 1, "ring_multiple": 1}
        if self.page_size is not None:
            counts["page_size"] = 1
        for name, least in counts.items():  # as ints, whatever kind of whole numbers was given
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        if self.definition not in DEFINITIONS:
            raise ValueError(
                f"definition: got {self.definition!r}; accepted: {', '.join(DEFINITIONS)}"
            )
        if self.kept is not None and self.page_size is not None:
            raise ValueError(
                f"kept: got {self.kept} with page_size {self.page_size}; accepted: one of the two, "
                f"since what an eviction leaves has slots of its own"
            )
        ours = {"page_size": None, "in_flight": 1, "ring_multiple": 1, "kept": None}
        for name, plain in ours.items():
            if self.definition != "kvjax" and getattr(self, name) != plain:
                raise ValueError(
                    f"{name}: got {getattr(self, name)} with definition {self.definition!r}; "
                    f"accepted: {plain}, since transformers' caches know no other"
                )

    def layout(self, layer: LayerSpec, exact: int = 0) -> LayoutSpec:
        """The layout that holds the layer's records, but for the newest `exact`."""
        span = layer.span and max(layer.span - exact, 1)
        return layout_of(span, self.page_size, self.in_flight, self.ring_multiple, self.kept)


def sequence_lengths(tokens: int, batch: Batch, dp: int) -> Counter[int]:
    """How many sequences of each length the fullest of `dp` replicas holds."""
    if isinstance(batch, Sequence):
        if not batch or not all(is_amount(share) and share <= 1 for share in batch):
            raise ValueError(
                f"batch: got {batch!r}; accepted: shares between 0 and 1, at least one"
            )
        # Rounded first, since 0.29 * 100 is less than 29. Dealt out longest first, so that the
        # first replica has the most.
        every = sorted((math.floor(round(share * tokens, 6)) for share in batch), reverse=True)
        return Counter(every[::dp])
    return Counter({tokens: -(-whole("batch", batch) // dp)})


def stages(depth: int, pp: int) -> list[range]:
    """The layers of each of `pp` stages, as even as possible."""
    if pp > depth:
        raise ValueError(f"pp: got {pp} for {depth} layers; accepted: at most {depth}")
    cuts = [depth * stage // pp for stage in range(pp + 1)]
    return [range(start, end) for start, end in itertools.pairwise(cuts)]

"""What is compiled and checked: a table of rows, and a subset of it with every pair.

Needs nothing but the standard library, so that names can be listed anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

ROWS = 4  # B
SLOTS = 8192  # S
WINDOW = 1024
SOFT_CAP = 50.0
# What rows of keys and values are multiples of.
ROW_BYTES = 32
# What pieces of pages are multiples of before Hopper.
COPIED_BYTES = 2048
LATENT, ROPE = 512, 64  # DeepSeek-V2 and V3

# K of each group: of Llama 2 7B, Llama 3 8B and 70B, Llama 3 405B, Falcon 7B and others.
KV_HEADS = {1: 32, 4: 8, 8: 8, 16: 8, 64: 1, 71: 1}
# Groups that are filled up to the same 8 heads take turns.
GROUPS = ((8, 1, 4), (16,), (64,), (71,))
DIMS = ((128, 128), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256))
PAGES = (None, 16, 64, 128)
RULES = ((), ("window",), ("soft cap",), ("window", "soft cap"))


@dataclass(frozen=True)
class Storage:
    """How keys and values lie in the cache.

    Attributes:
      name: of the row in a table.
      dtype: of k and v.
      query: dtype of q.
      scales: axes of k_scale and v_scale, None for none: () is one for all, K of each head, and
        BKS of each token.
    """

    name: str
    dtype: str
    query: str = "bfloat16"
    scales: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self.dtype in ("bfloat16", "float16") else 1


STORAGES = (
    Storage("bf16", "bfloat16"),
    Storage("f16", "float16", "float16"),
    Storage("e4m3", "float8_e4m3fn", scales=""),
    Storage("e4m3 by head", "float8_e4m3fn", scales="K"),
    Storage("e4m3 by token", "float8_e4m3fn", scales="BKS"),
    Storage("e5m2 by head", "float8_e5m2", "float16", scales="K"),
    Storage("int8 by head", "int8", scales="K"),
    Storage("int8 by token", "int8", scales="BKS"),
)


@dataclass(frozen=True)
class Case:
    """A call of `ops.decode_attention`.

    Attributes:
      unit: what multiplies: "wgmma" or "mma".
      storage: of the cache.
      dims: (H, HV).
      group: G.
      page: P, or None.
      rules: "window", "soft cap".
    """

    unit: str
    storage: Storage
    dims: tuple[int, int]
    group: int
    page: int | None
    rules: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As it stands in the baseline."""
        key, value = self.dims
        words = [self.unit, self.storage.name, f"H{key}"]
        words += [] if key == value else [f"HV{value}"]
        words += [f"G{self.group}"] + ([f"P{self.page}"] if self.page else []) + [*self.rules]
        return " ".join(words)

    @property
    def slots(self) -> int:
        """S. One KV head has more, so that even its scales are larger than the queries."""
        return SLOTS * (4 if KV_HEADS[self.group] == 1 else 1)

    @property
    def axes(self) -> frozenset[tuple[str, object]]:
        """What a pair is made of."""
        return frozenset(
            {
                ("storage", self.storage.name),
                ("dims", self.dims),
                ("group", self.group),
                ("page", self.page),
                ("rules", self.rules),
            }
        )


@dataclass(frozen=True)
class LatentCase:
    """A call of `ops.latent_decode_attention`: keys in two parts, the first of them the values.

    Attributes:
      unit: what multiplies: "wgmma" or "mma".
      heads: N.
      page: P, or None.
    """

    unit: str
    heads: int
    page: int | None

    @property
    def name(self) -> str:
        """As it stands in the baseline."""
        return f"{self.unit} latent N{self.heads}" + (f" P{self.page}" if self.page else "")


@dataclass(frozen=True)
class StepCase:
    """A decode step of a model as wide as Llama 3 8B and of few layers.

    Attributes:
      codec, page: of its cache, as in `Decoder.init_cache`; dense where P is None.
    """

    codec: str
    page: int | None

    @property
    def name(self) -> str:
        """As it stands in the baseline."""
        return f"step {self.codec}" + (f" P{self.page}" if self.page else "")


@dataclass(frozen=True)
class Negative:
    """A call with a fault, that the checker must find.

    Attributes:
      fault: what is wrong, a key of `negatives.MAKERS`.
      kinds: of the faults that may be found for it.
      says: what one of their texts must say, a regular expression.
    """

    fault: str
    kinds: tuple[str, ...]
    says: str = ""

    @property
    def name(self) -> str:
        """As it stands in messages."""
        return f"must fail: {self.fault}"


KernelCase = Case | LatentCase
Row = KernelCase | StepCase | Negative

# What multiplies where the library chooses.
UNITS = {"a100": "mma", "h100": "wgmma", "b200": "mma"}

STEPS = (
    StepCase("bf16", None),
    StepCase("int8", 64),
    StepCase("bf16", 64),
    StepCase("fp8_e4m3", None),
    StepCase("fp8_e4m3_token", 64),
)
# Of these, in the subset.
FEW_STEPS = 2

NEGATIVES = {
    "a100": (
        Negative("a plan with too many heads", ("spill",), "bytes of spills"),
        Negative("tiles loaded through registers", ("loads",), "into registers"),
        Negative("no barriers but those asked for", ("barrier",)),
    ),
    "h100": (
        Negative("a plan with too many heads", ("spill",), "bytes of spills"),
        Negative("too many tiles in flight", ("refused", "shared memory"), "shared memory"),
        Negative("more residents than fit", ("shared memory",), "2 blocks"),
        Negative("no fence before a product", ("fence",), "HGMMA"),
        Negative("no fence before a stage is given back", ("fence",), "given back"),
        Negative("no barriers but those asked for", ("barrier",)),
        Negative("tiles loaded through registers", ("loads",), "into registers"),
        Negative("every tile copied twice", ("bytes",)),
        Negative("XLA's attention on a cache by tokens", ("copies",), "transpose"),
        Negative("a step that does not donate its cache", ("copies",), "copy"),
    ),
    "b200": (
        Negative("wgmma on a GPU without it", ("refused", "died"), "wgmma|died"),
        Negative("a plan with too many heads", ("spill",), "bytes of spills"),
    ),
}


def every(unit: str, *, before_hopper: bool = False) -> list[Case]:
    """Each storage with all dims and groups; pages and rules take turns, as in a Latin square."""
    found = []
    indexed = itertools.product(enumerate(STORAGES), enumerate(DIMS), enumerate(GROUPS))
    for (s, storage), (d, dims), (g, groups) in indexed:
        rules = RULES[(s + 2 * d + 3 * g) % len(RULES)]
        turn = [PAGES[(s + d + g + i) % len(PAGES)] for i in range(len(PAGES))]
        cases = (Case(unit, storage, dims, groups[(s + d) % len(groups)], p, rules) for p in turn)
        found += [case for case in cases if _served(case, before_hopper)][:1]
    return found


def _served(case: Case, before_hopper: bool) -> bool:
    """Whether there is a kernel for it."""
    if any(dim * case.storage.itemsize % ROW_BYTES for dim in case.dims):
        return False
    if not before_hopper:
        return True
    # 8-bit floats are not known there. Of pages of 16, whole pieces are copied, 16 bytes by each
    # thread, and scales of tokens come 64 at a time.
    bits = any(16 * dim * case.storage.itemsize % COPIED_BYTES for dim in case.dims)
    small = case.page == 16 and (bits or case.storage.scales == "BKS")
    return not case.storage.dtype.startswith("float8") and not small


def latent(unit: str, *, many: bool) -> list[LatentCase]:
    """Few heads, as tensor parallelism leaves them, and all of DeepSeek's."""
    heads = (16, 64, 128) if many else (16,)
    return [LatentCase(unit, n, page) for n in heads for page in (None, 64)]


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Some of them, in which every pair of members is that is in any."""
    return _cover(cases, lambda case: itertools.combinations(sorted(case.axes, key=str), 2))


def each(cases: Iterable[Case]) -> list[Case]:
    """Fewer, in which every member is that is in any."""
    return _cover(cases, lambda case: case.axes)


def _cover(cases: Iterable[Case], parts: Callable[[Case], Iterable[object]]) -> list[Case]:
    cases = list(cases)
    having = {case: frozenset(parts(case)) for case in cases}
    missing, chosen = frozenset().union(*having.values()), []
    while missing:
        # The first of those that add most.
        best = max(cases, key=lambda case: len(having[case] & missing))
        chosen.append(best)
        missing -= having[best]
    return chosen


def rows(target: str, *, subset: bool) -> list[Row]:
    """All that is checked on a target."""
    unit = UNITS[target]
    cases = every(unit, before_hopper=target == "a100")
    found: list[Row] = [*(pairwise(cases) if subset else cases)]
    if target != "a100":
        found += latent(unit, many=True)
    if target == "h100":
        # What runs on later GPUs must not depend on what they have beside it.
        found += [*each(every("mma")), *latent("mma", many=False)]
    steps = [s for s in STEPS if target != "a100" or not s.codec.startswith("fp8")]
    return [*found, *steps[: FEW_STEPS if subset else None], *NEGATIVES[target]]

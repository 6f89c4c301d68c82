"""Named runs of decode attention, each with the bounds that it is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvjax.bench import cached_attention, decode_attention
from kvjax.bench.cached_attention import CacheCase
from kvjax.bench.case import Case
from kvjax.bench.decode_attention import CONTENDERS

type Entry = tuple[Case | CacheCase, str]  # a case and a contender


@dataclass(frozen=True)
class Bound:
    """The median seconds of `of` are at most `most` times those of `over`."""

    says: str
    of: Entry
    over: Entry
    most: float

    def figures(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The ratio in the rows of a run, and whether it holds; None where a side did not run."""
        of, over = (_median_seconds(rows, entry) for entry in (self.of, self.over))
        ratio = None if of is None or over is None else of / over
        return {
            "says": self.says,
            "ratio": ratio,
            "most": self.most,
            "holds": None if ratio is None else ratio <= self.most,
        }


@dataclass(frozen=True)
class Preset:
    """What is measured and how, and the bounds of it.

    Attributes:
      measure: gets `plan` and the options of a run.
      plan: cases, with their contenders where there are any beside this library.
      peers: whether torch is among them.
    """

    measure: Callable[..., dict[str, Any]]
    plan: Any
    bounds: Sequence[Bound]
    peers: bool = False


def run(name: str, *, torch_python: str | None = None, **options: Any) -> dict[str, Any]:
    """Measure a preset (options as its `measure` takes them); adds its `bounds`."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r}: accepted are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    if preset.peers:
        options["torch_python"] = torch_python
    elif torch_python is not None:
        raise ValueError(f"torch_python: got {torch_python!r}; preset {name!r} has no peers")
    figures = preset.measure(preset.plan, **options)
    figures["settings"]["preset"] = name
    return figures | {"bounds": [bound.figures(figures["rows"]) for bound in preset.bounds]}


def _median_seconds(rows: Sequence[Mapping[str, Any]], entry: Entry) -> float | None:
    case, contender = entry
    wanted = asdict(case) | {"contender": contender}
    for row in rows:
        if wanted.items() <= row.items():
            return row["median_seconds"]
    return None


def _acceptance() -> Preset:
    """GQA over 8192 tokens beside the peers, and 1024 live tokens in more and more capacity."""
    plan: dict[Case, Sequence[str]] = {}
    bounds = []
    for codec in ("f32", "bf16"):
        full = Case(4, 32, 8, 128, length=8192, capacity=8192, codec=codec)
        tight = Case(4, 32, 8, 128, length=1024, capacity=1024, codec=codec)
        roomy = Case(4, 32, 8, 128, length=1024, capacity=32768, codec=codec)
        plan |= {full: CONTENDERS, tight: ("kvjax",), roomy: ("kvjax",)}
        ours = (full, "kvjax")
        bounds += [
            Bound(f"{codec}: 4 times faster than jax.nn", ours, (full, "jax.nn"), 1 / 4),
            Bound(f"{codec}: no slower than torch, within 10 %", ours, (full, "torch"), 1.1),
            Bound(
                f"{codec}: 1024 live tokens cost as much in 32768 slots as in 1024, within 30 %",
                (roomy, "kvjax"),
                (tight, "kvjax"),
                1.3,
            ),
        ]
    return Preset(decode_attention.measure, plan, bounds, peers=True)


def _caches() -> Preset:
    """Every codec, pages and rings over 16384 tokens, one layer's step each."""

    def case(length: int = 16384, **choices: Any) -> CacheCase:
        return CacheCase(4, 32, 8, 128, length, **choices)

    full = {codec: case(codec=codec) for codec in CODECS}
    pages = [case(layout="paged:16", codec=codec) for codec in ("f32", "int8")]
    ring = case(layout="auto", codec="f32", window=1024)
    short = case(1024, codec="f32")
    bounds = [
        Bound("int8 is no slower than f32", (full["int8"], "kvjax"), (full["f32"], "kvjax"), 1.0),
        Bound(
            "a window of 1024 at 16384 tokens costs as much as 1024 tokens, within 30 %",
            (ring, "kvjax"),
            (short, "kvjax"),
            1.3,
        ),
    ]
    return Preset(cached_attention.measure, [*full.values(), *pages, ring, short], bounds)


# Of the preset "caches".
CODECS = ("f32", "bf16", "fp8_e4m3", "fp8_e4m3_token", "int8", "int4", "kivi4", "kivi2")

PRESETS = {"acceptance": _acceptance(), "caches": _caches()}

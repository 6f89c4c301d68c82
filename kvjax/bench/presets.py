"""Named runs of decode attention, each with the bounds that it is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvjax.bench.case import Case
from kvjax.bench.decode_attention import CONTENDERS, measure

type Entry = tuple[Case, str]  # a case and a contender


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
    """What to run (contenders by case), and its bounds."""

    plan: Mapping[Case, Sequence[str]]
    bounds: Sequence[Bound]


def run(name: str, **options: Any) -> dict[str, Any]:
    """Measure a preset (options as in `decode_attention.measure`); adds its `bounds`."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r}: accepted are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    figures = measure(preset.plan, **options)
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
    return Preset(plan, bounds)


PRESETS = {"acceptance": _acceptance()}

"""Whether a pass key is still found once most of the text around it is evicted.

python experiments/needle.py [--model DIR] [--quick] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from common import Experiment, Setup
from evictor import CONTENDERS, Evictor, copied, extended, filled, fitting, observed
from matplotlib.figure import Figure

from kvjax.bench.report import markdown_table
from kvjax.cache import Cache
from kvjax.engine import score
from kvjax.evict import Queries
from kvjax.models.tokenizer import load_tokenizer

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
INTRO = (
    "There is important information hidden inside a lot of irrelevant text. Find it and remember "
    "it. I will ask you about it.\n"
)
LEAD = " is"  # what is read after the eviction, before the key


CHAT_INTRO = "<|im_start|>user\n" + INTRO
STYLES = {  # what is asked after the text; after it comes `LEAD`, and then the key
    "question": " What is the pass key? The pass key",
    "no question": " The pass key",
    "labels": "\n\nQuestion: What is the pass key?\nAnswer: The pass key",
    "chat": "\nWhat is the pass key?<|im_end|>\n<|im_start|>assistant\nThe pass key",
}
QUESTION, PLAIN = STYLES["question"], ("question", "no question", "labels")


@dataclass(frozen=True)
class Sizes:
    """Tokens of the texts, and of those that policies evict from; slots that these keep."""

    lengths: tuple[int, ...]
    evicted: tuple[int, ...]
    budgets: tuple[int, ...]
    depths: int
    found: float


FULL = Sizes((512, 1024), (512,), (128, 64), 10, 0.9)
QUICK = Sizes((320,), (320,), (128,), 2, 0.0)
ROOM = 64  # slots for what is asked after a text
CASES = ("question unknown", "question known")

PUBLISHED = (
    "PyramidKV (abstract of arXiv:2406.02069): 128 entries a layer find every needle with "
    "Llama-3-70B; no other figure for needles was at hand"
)

ABOUT = (
    "A pass key of five digits is hidden at ten depths of a text that repeats the same sentences, "
    "a row for each depth. It counts as found where greedy decoding gives all of its digits. "
    "Policies meet the question in two ways: *unknown*, the text alone is "
    "observed and evicted from, and the question is read afterwards; *known*, the question but for "
    "its last word is a part of what is observed, and of what may be evicted. Budgets are slots "
    "of each layer and KV head, at equal bytes, as in [eviction](eviction.md)."
)


class Texts:
    """Rows of exactly `length` tokens that hide one key each, and a full cache of them."""

    def __init__(self, setup: Setup, before: str, length: int, depths: int):
        self.model, self.length = setup.model, length
        self._tokenizer = load_tokenizer(setup.directory)
        keys = np.random.default_rng(0).integers(10_000, 100_000, depths)
        places = zip(keys, np.linspace(0, 1, depths), strict=True)
        self._rows = np.stack([self._row(before, key, depth) for key, depth in places])
        self._keys = [self.ids(f" {key}") for key in keys]

    def ids(self, text: str) -> list[int]:
        """Tokens of a part of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _row(self, before: str, key: int, depth: float) -> np.ndarray:
        start, needle = self.ids(before), self.ids(NEEDLE.format(key=key))
        filler = self.ids(" " + FILLER)
        times, rest = divmod(self.length - len(start) - len(needle), len(filler))
        if times < 0:
            raise ValueError(f"length: got {self.length}; accepted: what the key's sentence takes")
        at = round(depth * times)
        # What is over of the filler comes first, so that the text ends with a sentence.
        start += filler[len(filler) - rest :]
        return np.array(start + filler * at + needle + filler * (times - at), np.int32)

    @cached_property
    def cache(self) -> Cache:
        """Of the texts, and room for what is asked."""
        return filled(self.model, self._rows, ROOM, "bf16")

    @cached_property
    def evictors(self) -> dict[str, Evictor]:
        """For each case, of what is observed; queries are made once."""
        asked = np.tile(np.array(self.ids(QUESTION), np.int32), (len(self._rows), 1))
        longer = extended(self.model, copied(self.cache), asked)
        queries = observed(self.model, longer, np.hstack([self._rows, asked]))
        early = [Queries(*(x[:, : self.length] for x in layer)) for layer in queries]
        evictors = Evictor(self.model, self.cache, early), Evictor(self.model, longer, queries)
        return dict(zip(CASES, evictors, strict=True))

    def answers(self, cache: Cache, question: str, asked: bool) -> dict[str, Any]:
        """Which keys are found, and the mean loss of their tokens; the cache is taken over."""
        question_ids, lead = self.ids(question), self.ids(LEAD)
        # As wide for what was asked before, so that one step is compiled.
        width = len(question_ids + lead) + max(map(len, self._keys))
        lead = lead if asked else question_ids + lead
        count = np.array([len(lead + key) for key in self._keys])
        tokens = np.zeros((len(count), width), np.int32)
        for row, key in zip(tokens, self._keys, strict=True):
            row[: len(lead + key)] = lead + key
        scores, _ = score(self.model, tokens, cache, count=count, chunk=width - 1)
        at = np.arange(1, width)  # entry i is of token i + 1
        of_key = (at >= len(lead)) & (at < count[:, None])
        found = ((scores.likeliest == tokens[:, 1:]) | ~of_key).all(1)
        return {
            "found": int(found.sum()),
            "by_depth": found.tolist(),
            "loss": float(scores.nll[of_key].mean()),
        }


def measure(setup: Setup) -> dict[str, Any]:
    """What the full cache finds, and, where that is enough, what policies leave of it."""
    sizes = QUICK if setup.quick else FULL
    full, evicted = [], []
    for length in sizes.lengths:
        texts = Texts(setup, INTRO, length, sizes.depths)
        full += [
            setup.measured(f"{style}, {length}", _full, texts, style)
            for style in (PLAIN if length == sizes.lengths[0] else PLAIN[:1])
        ]
        found = max(row["found"] for row in full if row["length"] == length)
        if length in sizes.evicted and found >= sizes.found * sizes.depths:
            evicted += _all_evicted(setup, texts, sizes.budgets)
    chat = Texts(setup, CHAT_INTRO, sizes.lengths[0], sizes.depths)
    full.append(setup.measured(f"chat, {chat.length}", _full, chat, "chat"))
    return {
        "text": "experiments/needle.py",
        "depths": sizes.depths,
        "needed": sizes.found,
        "full": full,
        "evicted": evicted,
    }


def _full(texts: Texts, style: str) -> dict[str, Any]:
    answers = texts.answers(copied(texts.cache), STYLES[style], asked=False)
    return {"style": style, "length": texts.length, **answers}


def _all_evicted(setup: Setup, texts: Texts, budgets: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        setup.measured(
            f"{name}, {budget} of {texts.length}, {case}", _evicted, texts, case, budget, name
        )
        for case in CASES
        for budget in budgets
        for name in CONTENDERS
    ]


def _evicted(texts: Texts, case: str, budget: int, name: str) -> dict[str, Any]:
    """What is found after a policy's eviction, or why it refuses."""
    evictor = texts.evictors[case]
    target = evictor.even_bytes(budget)
    row = {"policy": name, "case": case, "budget": budget, "length": texts.length}
    try:
        slots, indices = fitting(evictor, CONTENDERS[name], budget, target)
    except ValueError as error:
        return row | {"refused": str(error)}
    cache = evictor.kept(indices, texts.length + ROOM)
    answers = texts.answers(cache, QUESTION, asked=case == "question known")
    nbytes = evictor.nbytes(indices)
    return row | {"slots": slots, "bytes": nbytes, "target_bytes": target, **answers}


def page(figures: Mapping[str, Any]) -> Iterator[str]:
    """What the full cache finds, then what is left by length and case."""
    depths = figures["depths"]
    yield "With the full cache, by what stands around the text:"
    yield markdown_table(
        ["style", "tokens", f"found of {depths}", "loss of a key's token"],
        [
            [row["style"], f"{row['length']:,}", str(row["found"]), f"{row['loss']:.3g}"]
            for row in figures["full"]
        ],
    )
    if not figures["evicted"]:
        yield (
            f"At no length does the full cache find {figures['needed']:.0%} of the keys: what is "
            f"evicted cannot be told from what was never found, and no policy was tried."
        )
        return
    for length in dict.fromkeys(row["length"] for row in figures["evicted"]):
        rows = [row for row in figures["evicted"] if row["length"] == length]
        yield f"Found of {depths} in {length:,} tokens, with slots left a layer and KV head:"
        yield _table(rows)
    yield _verdict(figures)
    yield f"Published: {PUBLISHED}."


def _table(rows: list[Mapping[str, Any]]) -> str:
    """Policies by case and budget."""
    by = {
        (row["policy"], row["case"], row["budget"]): str(row.get("found", "refused"))
        for row in rows
    }
    columns = list(dict.fromkeys((case, budget) for _, case, budget in by))
    headings = [f"{case.split()[1]}, {budget}" for case, budget in columns]
    lines = [
        [name, *(by[name, *column] for column in columns)]
        for name in dict.fromkeys(name for name, *_ in by)
    ]
    return markdown_table(["policy", *headings], lines)


def _verdict(figures: Mapping[str, Any]) -> str:
    """What knowing the question is worth, and which policies find nine in ten without it."""
    rows = [row for row in figures["evicted"] if "found" in row]
    totals = {case: [row["found"] for row in rows if row["case"] == case] for case in CASES}
    rates = {case: np.mean(found) / figures["depths"] for case, found in totals.items()}
    needed = 0.9 * figures["depths"]
    names = {
        f"{row['policy']} ({row['budget']} of {row['length']:,})"
        for row in rows
        if row["case"] == CASES[0] and row["found"] >= needed
    }
    says = ", ".join(sorted(names)) or "none"
    return (
        f"Over all policies, budgets and lengths {rates[CASES[0]]:.0%} of the keys are found where "
        f"the question was unknown and {rates[CASES[1]]:.0%} where it was known. Without knowing "
        f"it, nine in ten are found by: {says}."
    )


def draw(figures: Mapping[str, Any]) -> Figure:
    """Found by policy, known and unknown, a panel for each length and budget."""
    rows = figures["evicted"]
    panels = list(dict.fromkeys((row["length"], row["budget"]) for row in rows))
    figure = Figure(figsize=(2 + 2.2 * max(len(panels), 1), 4), layout="constrained")
    if not rows:
        axes = figure.subplots()
        full = figures["full"]
        names = [f"{row['style']}, {row['length']:,}" for row in full]
        axes.barh(names, [row["found"] for row in full])
        axes.set(xlabel=f"found of {figures['depths']}, full cache")
        return figure
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (length, budget) in zip(grid, panels, strict=True):
        same = [row for row in rows if (row["length"], row["budget"]) == (length, budget)]
        for case, color, shift in zip(CASES, ("C0", "C1"), (-0.2, 0.2), strict=True):
            part = [row for row in same if row["case"] == case]
            at = np.arange(len(part)) + shift
            axes.barh(at, [row.get("found", 0) for row in part], 0.4, color=color, label=case)
        names = [row["policy"] for row in same if row["case"] == CASES[0]]
        axes.set_yticks(range(len(names)), labels=names, fontsize="small")
        axes.set(title=f"{budget} of {length:,}", xlabel=f"found of {figures['depths']}")
    grid[0].invert_yaxis()
    grid[0].legend(fontsize="x-small")
    return figure


EXPERIMENT = Experiment("needle", "A pass key after eviction", ABOUT, measure, page, draw)

if __name__ == "__main__":
    EXPERIMENT.main()

"""What nine eviction policies lose at equal bytes, after a prompt and while decoding.

python experiments/eviction.py [--model DIR] [--quick] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from common import Experiment, Setup
from evictor import CONTENDERS, CONTROLS, Evictor, copied, extended, filled, fitting, observed
from matplotlib.figure import Figure

from kvjax.bench.report import markdown_table
from kvjax.cache import Cache, SinkRing
from kvjax.engine import Eviction, Scores, score
from kvjax.evict import POLICIES, Adaptive


@dataclass(frozen=True)
class Sizes:
    """Tokens: prompts of `rows` rows, what follows them, and slots a layer and head.

    The second part decodes `decoded` tokens after the first row's prompt, and evicts to
    `decode_budget` slots after every `every` of them.
    """

    rows: int
    prompt: int
    continuation: int
    budgets: tuple[int, ...]
    decoded: int
    every: int
    decode_budget: int


FULL = Sizes(2, 2048, 256, (512, 256, 128), 512, 64, 256)
QUICK = Sizes(1, 160, 16, (96,), 32, 16, 96)
INT8_POLICIES = 2
WHILE_DECODING, RING = ("streaming-llm", "h2o", "snapkv"), "4 sinks and a ring"


PUBLISHED = {
    "source": "abstracts of arXiv:2401.06104, 2406.02069, 2306.14048 and 2510.00636",
    "claims": {
        "tova": "near the full model with 1/8 of the cache",
        "pyramidkv": "on LongBench on a par with the full cache with 12 % of it",
        "h2o": "20 % of the tokens as heavy hitters; figures of throughput alone",
        "expected-attention": "no figure in the abstract",
    },
}

ABOUT = (
    "Prompts are read once into a full cache; each policy evicts from it, and the text that "
    "follows is read, teacher-forced, through what is left. Losses and KL from the full bf16 "
    "cache are means over the tokens that follow, in nats. Policies are compared at equal bytes of "
    "the cache after eviction, positions and counts included. *Slots* are those that a policy was "
    "given, of each layer and KV head: AdaKV's heads keep different numbers and all take as many "
    "slots as the greediest of any row, so that it is given fewer; int8 pays for more. PyramidKV "
    "is refused where its last layer would have fewer slots than its window, which is below a "
    "budget of 20 windows; published code then keeps the same of every layer without saying so. "
    "Keys keep the rotation of their place in the text."
)


class Run:
    """Texts, and the caches that all measurements start from, made when the first needs them."""

    def __init__(self, setup: Setup):
        self.setup, self.model = setup, setup.model
        self.sizes = sizes = QUICK if setup.quick else FULL
        self.text = setup.rows(sizes.rows, sizes.prompt + sizes.decoded + 1)
        self.prompts = self.text[:, : sizes.prompt]
        self.follows = self.text[:, sizes.prompt : sizes.prompt + sizes.continuation + 1]
        self._evictors: dict[str, Evictor] = {}

    @property
    def slots(self) -> int:
        """Of all caches that are measured, so that few steps are compiled."""
        return self.sizes.prompt + self.sizes.continuation

    def evictor(self, codec: str, newest: int | None = None) -> Evictor:
        """Of the full cache in a codec, which knows the queries of so many tokens; None for all."""
        if codec not in self._evictors:
            full = filled(self.model, self.prompts, self.sizes.decoded, codec)
            queries = observed(self.model, full, self.prompts[:, -(newest or 0) :])
            self._evictors[codec] = Evictor(self.model, full, queries)
        return self._evictors[codec]

    def following(self, cache: Cache, reference: Scores | None) -> Scores:
        """Scores of what follows the prompts; the cache is taken over."""
        width = self.sizes.continuation
        return score(self.model, self.follows, cache, chunk=width, reference=reference)[0]

    @cached_property
    def exact(self) -> Scores:
        """Of what follows, through the full cache in bf16."""
        return self.following(copied(self.evictor("bf16").cache), None)

    @cached_property
    def exact_decoding(self) -> Scores:
        """Of all that follows the first prompt, likewise."""
        first = copied(self.evictor("bf16").cache.select(jnp.arange(1)))
        text = self.text[:1, self.sizes.prompt :]
        return score(self.model, text, first, chunk=self.sizes.every)[0]


def measure(setup: Setup) -> dict[str, Any]:
    """Losses after a prompt, by policy, budget and codec; and losses while decoding."""
    run = Run(setup)
    full = setup.measured("full, bf16", lambda: {"loss": run.exact.loss})
    losses = [
        setup.measured(f"{name}, bf16, {budget}", _evicted, run, name, "bf16", budget, None)
        for budget in run.sizes.budgets
        for name in CONTENDERS
    ]
    best = _best(losses)
    needs = [CONTENDERS[name].observe for name in best]
    most = None if None in needs else max(1, *needs)
    full_int8 = setup.measured("full, int8", _full, run, "int8", most)
    losses += [
        setup.measured(f"{name}, int8, {budget}", _evicted, run, name, "int8", budget, most)
        for budget in run.sizes.budgets
        for name in best
    ]
    return {
        "rows": run.sizes.rows,
        "prompt_tokens": run.sizes.prompt,
        "tokens": run.sizes.rows * run.sizes.continuation,
        "full": full,
        "full_int8": full_int8,
        "losses": losses,
        "decode_budget": run.sizes.decode_budget,
        "every": run.sizes.every,
        "decoded": run.sizes.decoded,
        "decoding": [
            setup.measured(f"decoding, {name}", _decoded, run, name)
            for name in (*WHILE_DECODING, RING)
        ],
    }


def _full(run: Run, codec: str, newest: int | None) -> dict[str, Any]:
    scores = run.following(copied(run.evictor(codec, newest).cache), run.exact)
    return {"loss": scores.loss, "kl": scores.divergence}


def _evicted(run: Run, name: str, codec: str, budget: int, newest: int | None) -> dict[str, Any]:
    """Loss of what follows through the cache that a policy leaves, or why it refuses."""
    evictor, target = run.evictor(codec, newest), run.evictor("bf16").even_bytes(budget)
    row = {"policy": name, "codec": codec, "budget": budget, "target_bytes": target}
    try:
        slots, indices = fitting(evictor, CONTENDERS[name], budget, target)
    except ValueError as error:
        return row | {"refused": str(error)}
    cache = evictor.kept(indices, run.slots)
    kept = [int((layer.pos >= 0).sum()) / layer.pos[..., 0].size for layer in cache.layers]
    scores = run.following(cache, run.exact)
    return row | {
        "slots": slots,
        "kept": float(np.mean(kept)),
        "bytes": evictor.nbytes(indices),
        "loss": scores.loss,
        "kl": scores.divergence,
        "kl_standard_error": float(scores.kl.std() / scores.kl.size**0.5),
        "kl_by_prompt": scores.kl.mean(1).tolist(),
    }


def _best(losses: list[dict[str, Any]]) -> list[str]:
    """Names of the policies of even heads with the least KL, in the mean of all budgets."""
    kl: dict[str, list[float]] = {}
    for row in losses:
        kl.setdefault(row["policy"], []).append(row.get("kl", np.inf))
    even = [name for name in kl if not isinstance(CONTENDERS[name].heads, Adaptive)]
    even = [name for name in even if name not in CONTROLS]
    return sorted(even, key=lambda name: np.mean(kl[name]))[:INT8_POLICIES]


def _decoded(run: Run, name: str) -> dict[str, Any]:
    """The first row's text goes on: a policy evicts every so many tokens, a ring at each."""
    sizes, model = run.sizes, run.model
    text, every = run.text[:1], sizes.every
    exact, evictor = run.exact_decoding, run.evictor("bf16")
    if name == RING:
        slots = sizes.decode_budget + every
        ring = model.init_cache(1, text.shape[1], SinkRing(4, slots - 4), "bf16")
        cache, evict = extended(model, ring, text[:, : sizes.prompt]), None
    else:
        evict = Eviction(POLICIES[name], sizes.decode_budget, every)
        kept = evictor.kept(evictor.indices(evict.policy, evict.budget), evict.budget + every)
        cache = kept.select(jnp.arange(1))
    nbytes, loss, kl = cache.nbytes, [], []
    for start in range(0, sizes.decoded, every):
        at = sizes.prompt + start
        if start and evict is not None:
            cache = evict(model, cache, text[:, at - every : at])
        piece, reference = text[:, at : at + every + 1], _part(exact, start, every)
        scores, cache = score(model, piece, cache, chunk=every, reference=reference)
        loss.append(scores.loss)
        kl.append(scores.divergence)
    figures = {"loss": float(np.mean(loss)), "kl": float(np.mean(kl)), "kl_by_part": kl}
    return {"policy": name, "bytes": nbytes, "full_loss": exact.loss, **figures}


def _part(scores: Scores, start: int, many: int) -> Scores:
    """Scores of `many` of the tokens."""
    part = slice(start, start + many)
    return replace(
        scores,
        nll=scores.nll[:, part],
        likeliest=scores.likeliest[:, part],
        predicted=np.full_like(scores.predicted, many),
        states=scores.states[:, part],
    )


def page(figures: Mapping[str, Any]) -> Iterator[str]:
    """KL and losses by policy and budget, the published claims, and decoding."""
    losses, full, rows = figures["losses"], figures["full"]["loss"], figures["rows"]
    yield (
        f"{rows} prompts of {figures['prompt_tokens']:,} tokens, {figures['tokens']:,} tokens "
        f"after them. The full cache has a loss of {full:.4f}; in int8 it has a KL of "
        f"{figures['full_int8']['kl']:.2g}."
    )
    yield "KL from the full cache, nats per token, and its standard error over tokens:"
    yield _table(figures, lambda row: f"{row['kl']:.4f} ± {row['kl_standard_error']:.4f}")
    yield "Loss above the full cache's, nats per token:"
    yield _table(figures, lambda row: f"{row['loss'] - full:+.4f}")
    yield "Slots given, and bytes relative to the heading's:"
    yield _table(figures, lambda row: f"{row['slots']} ({row['bytes'] / row['target_bytes']:.3f})")
    yield _verdict(figures)
    yield _pyramid(figures)
    refused = {row["policy"]: row["refused"] for row in losses if "refused" in row}
    if refused:
        yield "Refused, at the smallest budget: " + "; ".join(
            f"{name}, “{reason}”" for name, reason in refused.items()
        )
    yield (
        f"Published, of other models and tasks ({PUBLISHED['source']}; the papers' tables are not "
        f"compared):"
    )
    claims = [[name, claim, *_beside(figures, name)] for name, claim in PUBLISHED["claims"].items()]
    yield markdown_table(["policy", "claim", "share of slots here", "KL here"], claims)
    yield from _decoding_page(figures)


def _table(figures: Mapping[str, Any], cell: Callable[[Mapping[str, Any]], str]) -> str:
    """Policies by budgets."""
    losses = figures["losses"]
    budgets = {row["budget"]: row["target_bytes"] / figures["rows"] / 2**20 for row in losses}
    by = {
        (row["policy"], row["codec"], row["budget"]): "refused" if "refused" in row else cell(row)
        for row in losses
    }
    lines = [
        [policy + f", {codec}" * (codec != "bf16"), *(by[policy, codec, b] for b in budgets)]
        for policy, codec in dict.fromkeys((policy, codec) for policy, codec, _ in by)
    ]
    headings = [f"{budget} slots, {mib:.2f} MiB" for budget, mib in budgets.items()]
    return markdown_table(["policy", *headings], lines)


def _decoding_page(figures: Mapping[str, Any]) -> Iterator[str]:
    slots, every = figures["decode_budget"], figures["every"]
    rows = figures["decoding"]
    yield (
        f"While decoding {figures['decoded']:,} tokens after the first prompt, with {slots} slots "
        f"and room for {every} tokens: policies evict whenever that room is used, by the queries "
        f"of those {every} tokens alone (H2O's sums begin anew), and the ring has read the prompt "
        f"through itself. The full cache has a loss of {rows[0]['full_loss']:.4f}."
    )
    yield markdown_table(
        ["cache", "MiB", "loss above", "KL"],
        [
            [
                row["policy"],
                f"{row['bytes'] / 2**20:.2f}",
                f"{row['loss'] - row['full_loss']:+.4f}",
                f"{row['kl']:.4f}",
            ]
            for row in rows
        ],
    )


def _beside(figures: Mapping[str, Any], name: str) -> list[str]:
    """Ours at the budget next to the claim's share."""
    share = {"h2o": 0.2}.get(name, 0.125)
    prompt = figures["prompt_tokens"]
    same = [row for row in figures["losses"] if row["policy"] == name and row["codec"] == "bf16"]
    row = min(same, key=lambda row: abs(row["budget"] / prompt - share))
    return [f"{row['budget'] / prompt:.1%}", "refused" if "refused" in row else f"{row['kl']:.4f}"]


def _verdict(figures: Mapping[str, Any]) -> str:
    """The best at each budget, and what is no better than chance."""
    says = []
    for budget in dict.fromkeys(row["budget"] for row in figures["losses"]):
        same = {
            row["policy"]: row["kl"]
            for row in figures["losses"]
            if row["budget"] == budget and row["codec"] == "bf16" and "kl" in row
        }
        chance = min(kl for name, kl in same.items() if name in CONTROLS)
        order = sorted((name for name in same if name not in CONTROLS), key=same.get)
        worse = [name for name in order if same[name] >= chance]
        says.append(
            f"At {budget} slots the least KL is {order[0]}'s ({same[order[0]]:.4f}), then "
            f"{order[1]}'s ({same[order[1]]:.4f}); the better random control has {chance:.4f}"
            + (f", and no better than it are {', '.join(worse)}." if worse else ".")
        )
    return " ".join(says)


def _pyramid(figures: Mapping[str, Any]) -> str:
    """What the pyramid does where there is one, beside layers that keep the same."""
    kl = {
        (row["policy"], row["budget"]): row["kl"]
        for row in figures["losses"]
        if row["codec"] == "bf16" and "kl" in row
    }
    pairs = [
        f"{kl[name, budget]:.4f} for {kl['snapkv, window 8', budget]:.4f} at {budget} slots"
        for name, budget in kl
        if name == "pyramidkv, window 8"
    ]
    return f"KL of the pyramid of window 8, for that of equal layers: {', '.join(pairs)}."


def draw(figures: Mapping[str, Any]) -> Figure:
    """KL over bytes, and over the tokens decoded."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [row for row in figures["losses"] if "kl" in row]
    for i, name in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        for codec, style in (("bf16", "o-"), ("int8", "^:")):
            line = [row for row in rows if row["policy"] == name and row["codec"] == codec]
            if line:
                x = [row["bytes"] / figures["rows"] / 2**20 for row in line]
                color = "0.6" if name in CONTROLS else f"C{i % 10}"
                label = name + (", int8" if codec == "int8" else "")
                left.plot(x, [row["kl"] for row in line], style, color=color, ms=4, label=label)
    left.set(xlabel="MiB a prompt", ylabel="KL from the full cache", xscale="log", yscale="log")
    left.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    for row in figures["decoding"]:
        right.plot(row["kl_by_part"], ".-", label=row["policy"])
    right.set(xlabel="evictions", ylabel="KL from the full cache", yscale="log")
    right.legend(fontsize="small")
    return figure


EXPERIMENT = Experiment("eviction", "Eviction at equal bytes", ABOUT, measure, page, draw)

if __name__ == "__main__":
    EXPERIMENT.main()

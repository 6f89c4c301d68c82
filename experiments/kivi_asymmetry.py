"""Along which axis keys and values take few bits, and which way each was meant to take them.

Tables 1 and 2 of KIVI (Liu et al. 2024, arXiv:2402.02750): keys want a scale per channel, since
some channels are large in every token; values want one per token.

    python experiments/kivi_asymmetry.py [--model DIR] [--quick] [--resume] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Experiment, Setup
from jax import Array
from matplotlib.figure import Figure

from kvjax.bench.report import markdown_table
from kvjax.cache import Cache, Dense, Kivi, Record, SlotCache
from kvjax.engine import Scores, score
from kvjax.nn import Decoder
from kvjax.nn.watch import projections

GROUP = 32
BITS = (2, 4)
ROWS, TOKENS = 2, 1024
BY = {True: "channel", False: "token"}
ARRANGEMENTS = [(k, v) for k in (True, False) for v in (False, True)]  # by channel: keys, values
RESIDUALS = (128, 32)

PUBLISHED: dict[str, Any] = {
    "source": "arXiv:2402.02750, Tables 1 and 2 and its main results",
    # Llama-2-13B, percent; errors are Frobenius norms relative to the exact one's.
    "table_2": {"token": {"k": 13.67, "a": 47.00}, "channel": {"k": 4.55, "a": 9.60}},
    "table_2_output": "the output error of values by channel is about 15 times that by token",
    # Llama-2-7B: CoQA, TruthfulQA, GSM8K.
    "tasks": {
        "16 bits": [63.88, 30.76, 13.50],
        "2 bits, K by channel, V by token": [59.08, 33.10, 5.76],
        "2 bits, K by channel, V by channel": [3.60, 0.27, 0.0],
        "2 bits, K by token, V by token": [39.88, 18.29, 0.83],
        "2 bits, K by token, V by channel": [1.30, 0.49, 0.08],
        "KIVI-2, G=32, R=128": [63.05, 33.95, 12.74],
        "KIVI-4, G=32, R=128": [63.78, 30.80, 13.80],
    },
}

ABOUT = (
    f"Asymmetric codes in groups of {GROUP}: along tokens with a scale per channel, or along "
    f"channels with a scale per token. Errors are of the model's own keys, values and queries, "
    f"each head's Frobenius norm relative to the exact one's, and their mean over layers, heads "
    f"and texts. Losses are of a text read in chunks of {GROUP} tokens: a chunk is exact to itself "
    f"and whatever came before it is quantised. Rows with a residual go through the library's "
    f"own cache, which keeps the newest tokens in 16 bits and packs the codes of the others; the "
    f"others hold quantised numbers in f32."
)


def quantised(x: Array, most: Array | int, by_channel: Array | bool) -> Array:
    """x (..., T, H) through codes from 0 to `most` and back, in groups of up to `GROUP`."""
    shape = x.shape

    def along(axis: int) -> Array:
        size = min(GROUP, shape[axis])
        parts = (size, shape[-1]) if axis == -2 else (shape[-1] // size, size)
        grouped = x.reshape(*shape[:-2], -1, *parts)
        low, high = grouped.min(axis, keepdims=True), grouped.max(axis, keepdims=True)
        scale = (high - low) / most
        codes = jnp.round((grouped - low) / jnp.where(scale > 0, scale, 1))
        return (codes * scale + low).reshape(shape)

    return jnp.where(by_channel, along(-2), along(-1))


@dataclass(frozen=True)
class Fake:
    """A codec that quantises and keeps the result in f32; a step's tokens are whole groups.

    How is data, so that one compiled step serves all arrangements.
    """

    name = "fake"
    plain = True

    def scales(self, kv_heads: int) -> dict[str, Array]:
        """The settings, that `settings` makes."""
        return self.settings(2, True, False)

    @staticmethod
    def settings(bits: int, k_by_channel: bool, v_by_channel: bool) -> dict[str, Array]:
        """What `encode` goes by."""
        return {
            "most": jnp.float32(2**bits - 1),
            "k": jnp.asarray(k_by_channel),
            "v": jnp.asarray(v_by_channel),
        }

    def encode(self, record: Record, scales: Mapping[str, Array]) -> dict[str, Array]:
        """Keys and values, quantised."""
        return {
            name: quantised(x.astype(jnp.float32), scales["most"], scales[name])
            for name, x in record._asdict().items()
        }

    def decode(self, leaves: Mapping[str, Array], scales: Mapping[str, Array]) -> Record:
        """As they are."""
        return Record(leaves["k"], leaves["v"])


def measure(setup: Setup) -> dict[str, Any]:
    """Errors of keys, scores, values and outputs; losses of all arrangements and of KIVI."""
    rows, tokens = (1, 96) if setup.quick else (ROWS, TOKENS)
    text = setup.rows(rows, tokens + 1)
    errors = setup.measured("errors", _errors, setup.model, text[:, :tokens])
    return {
        "group": GROUP,
        "rows": rows,
        "tokens": rows * tokens,
        "errors": errors["rows"],
        "losses": _losses(setup, text),
    }


def _errors(model: Decoder, tokens: np.ndarray) -> dict[str, Any]:
    """For each number of bits and axis, the mean errors, and those of each layer."""
    count = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    layers = [layer for layer in jax.jit(projections)(model, tokens, count) if layer is not None]
    found = []
    for bits in BITS:
        for by_channel in BY:
            of_layers = [_layer_errors(*layer[:3], 2**bits - 1, by_channel) for layer in layers]
            figures = {name: [float(layer[name]) for layer in of_layers] for name in "kavo"}
            means = {name: float(np.mean(values)) for name, values in figures.items()}
            found.append({"bits": bits, "by": BY[by_channel], **means, "by_layer": figures})
    return {"rows": found}


@jax.jit
def _layer_errors(q: Array, k: Array, v: Array, most: Array, by_channel: Array) -> dict[str, Array]:
    """Relative errors of keys, attention, values and outputs: `k`, `a`, `v`, `o`.

    q (B, T, N, H), k (B, T, K, H), v (B, T, K, HV); one row of a text after the other, as the
    attention of all would not fit.
    """
    group = q.shape[2] // k.shape[2]

    def of_text(q: Array, k: Array, v: Array) -> dict[str, Array]:
        k, v = jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1)
        k_codes, v_codes = (quantised(x, most, by_channel) for x in (k, v))
        # (K, G, T, H)
        q = jnp.moveaxis(q.reshape(len(q), -1, group, q.shape[-1]), 0, 2)
        seen = jnp.tril(jnp.ones((q.shape[2],) * 2, bool))

        def attention(k: Array) -> Array:
            scores = jnp.einsum("kgth,ksh->kgts", q, k) * q.shape[-1] ** -0.5
            return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)

        exact = attention(k)
        outputs = [jnp.einsum("kgts,ksh->kgth", exact, x) for x in (v, v_codes)]
        return {
            "k": _relative(k, k_codes),
            "a": _relative(exact, attention(k_codes)),
            "v": _relative(v, v_codes),
            "o": _relative(*outputs),
        }

    errors = jax.lax.map(lambda text: of_text(*text), (q, k, v))
    return {name: jnp.mean(error) for name, error in errors.items()}


def _relative(exact: Array, other: Array) -> Array:
    """Frobenius norms of the difference over the exact one's, matrix by matrix."""
    return jnp.linalg.norm(exact - other, axis=(-2, -1)) / jnp.linalg.norm(exact, axis=(-2, -1))


def _losses(setup: Setup, text: np.ndarray) -> list[dict[str, Any]]:
    """A row for f32, for each number of bits and arrangement, and for the library's KIVI."""
    model, rows, capacity = setup.model, len(text), text.shape[1]

    @cache
    def exact() -> Scores:
        return score(model, text, model.init_cache(rows, capacity, "dense", "f32"), chunk=GROUP)[0]

    def lossless() -> dict[str, Any]:
        return {"bits": None, "residual": None, "loss": exact().loss, "kl": 0.0}

    def lossy(bits: int, residual: int | None, empty: Callable[[], Cache]) -> dict[str, Any]:
        scores, _ = score(model, text, empty(), chunk=GROUP, reference=exact())
        figures = {"loss": scores.loss, "kl": scores.divergence}
        return {"bits": bits, "residual": residual, **figures}

    found = [setup.measured("f32", lossless)]
    for bits in BITS:
        for by in ARRANGEMENTS:
            name = "{} bits, K by {}, V by {}".format(bits, *(BY[one] for one in by))
            empty = partial(_fake_cache, model, rows, capacity, Fake.settings(bits, *by))
            found.append(setup.measured(name, lossy, bits, None, empty))
        for residual in RESIDUALS:
            name = f"KIVI-{bits}, G={GROUP}, R={residual}"
            codec = Kivi(bits, GROUP, residual)
            empty = partial(model.init_cache, rows, capacity, "dense", codec)
            found.append(setup.measured(name, lossy, bits, residual, empty))
    return found


def _fake_cache(model: Decoder, rows: int, capacity: int, settings: Mapping[str, Array]) -> Cache:
    # Each layer has settings of its own: a buffer that two share could not be donated.
    return Cache(
        tuple(
            SlotCache.init(
                rows,
                Dense(capacity),
                layer.kv_heads,
                layer.key_dim,
                layer.value_dim,
                Fake(),
                {name: jnp.copy(x) for name, x in settings.items()},
            )
            for layer in model.config.attention
        )
    )


def page(figures: Mapping[str, Any]) -> list[str]:
    """Errors beside the published ones, then losses beside the published tasks."""
    published = PUBLISHED["table_2"]
    errors = []
    for row in figures["errors"]:
        theirs = published[row["by"]] if row["bits"] == 2 else {}
        errors.append(
            [
                f"{row['bits']} bits by {row['by']}",
                *(f"{row[name] * 100:.2f}" for name in "kavo"),
                *(f"{theirs[name]:.2f}" if name in theirs else "" for name in "ka"),
            ]
        )
    tasks = PUBLISHED["tasks"]
    exact = figures["losses"][0]["loss"]
    losses = []
    for row in figures["losses"]:
        theirs = tasks.get("16 bits" if row["bits"] is None else row["name"])
        scores = [f"{score:.2f}" for score in theirs] if theirs else [""] * 3
        shown = [f"{row['loss']:.4f}", f"{row['loss'] - exact:+.4f}", f"{row['kl']:.4g}"]
        losses.append([row["name"], *shown, *scores])
    return [
        f"Relative errors in percent, over {figures['tokens']:,} tokens; attention is that with "
        f"quantised keys, output that of exact attention over quantised values. Published: "
        f"{PUBLISHED['source']}; Llama-2-13B.",
        markdown_table(
            [
                "",
                "keys",
                "attention",
                "values",
                "output",
                "keys, published",
                "attention, published",
            ],
            errors,
        ),
        _verdict(figures),
        f"Loss in nats per token, and KL from f32, over {figures['tokens']:,} tokens; beside them "
        f"what was published of Llama-2-7B on three tasks.",
        markdown_table(["cache", "loss", "over f32", "KL", "CoQA", "TruthfulQA", "GSM8K"], losses),
        _order(figures),
    ]


def _verdict(figures: Mapping[str, Any]) -> str:
    """What two bits do by either axis."""
    two = {row["by"]: row for row in figures["errors"] if row["bits"] == 2}
    channel, token = two["channel"], two["token"]
    published = PUBLISHED["table_2"]
    theirs = published["token"]["k"] / published["channel"]["k"]
    return (
        f"At 2 bits, keys by token have {token['k'] / channel['k']:.2f} times the error of keys by "
        f"channel (published {theirs:.2f}), and their attention "
        f"{token['a'] / channel['a']:.2f} times (published "
        f"{published['token']['a'] / published['channel']['a']:.2f}). Values by channel have "
        f"{channel['v'] / token['v']:.2f} times the error of values by token, and their output "
        f"{channel['o'] / token['o']:.2f} times (published: {PUBLISHED['table_2_output']})."
    )


def _order(figures: Mapping[str, Any]) -> str:
    """Whether the paper's arrangement loses least."""
    says = []
    for bits in BITS:
        losses = {
            row["name"]: row["kl"]
            for row in figures["losses"]
            if row["bits"] == bits and row["residual"] is None
        }
        order = ", ".join(
            f"{name.split(', ', 1)[1]} ({kl:.3g})"
            for name, kl in sorted(losses.items(), key=lambda item: item[1])
        )
        says.append(f"At {bits} bits, from the least KL to the largest: {order}.")
    return " ".join(says)


def draw(figures: Mapping[str, Any]) -> Figure:
    """Errors of each layer at 2 bits, and the KL of each arrangement."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in figures["errors"]:
        if row["bits"] == 2:
            style = "-" if row["by"] == "channel" else "--"
            for name, color in (("k", "C0"), ("o", "C1")):
                what = {"k": "keys", "o": "output, by values"}[name]
                label = f"{what}, by {row['by']}"
                left.plot(row["by_layer"][name], style, color=color, label=label)
    left.set(xlabel="layer", ylabel="relative error, 2 bits", yscale="log")
    left.legend(fontsize="small")
    rows = figures["losses"][1:]
    right.barh([row["name"] for row in rows], [row["kl"] for row in rows])
    right.invert_yaxis()
    right.tick_params(labelsize="small")
    right.set(xlabel="KL from f32, nats per token", xscale="log")
    return figure


EXPERIMENT = Experiment(
    "kivi_asymmetry", "Keys by channel, values by token", ABOUT, measure, page, draw
)

if __name__ == "__main__":
    EXPERIMENT.main()

"""The page and the plot of `variants_sweep.py`, of its figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.bench.report import markdown_table

# Ids of the article's ratios, in the order of the tables over KV heads.
ARTICLE = ("sweep.latency.b32.16k", "sweep.latency.b64.64k")


def page(figures: Mapping[str, Any]) -> list[str]:
    """All tables, with what they say."""
    tables, theirs = figures["tables"], figures["published"]
    parts = []
    for table, name in zip(tables, ARTICLE, strict=False):
        parts += [f"## {table['name']}", _heads_table(table), _heads_says(table, theirs[name])]
    for table in tables[len(ARTICLE) :]:
        parts += [f"## {table['name']}", _table(table)]
        if table["name"].startswith("Batch"):
            parts.append(_batch_says(table, theirs["batching.51x"]))
    return [*parts, "## Fewer bytes", *_fewer_page(figures["fewer_bytes"])]


def _batch_says(table: Mapping[str, Any], theirs: float) -> str:
    alone, most = table["rows"][0], table["rows"][-1]
    ratio = most["tokens_per_second"] / alone["tokens_per_second"]
    return (
        f"A row is {ratio:.2f} times faster in a batch of {most['batch']} than alone (the "
        f"article's kernel, from 1 to its largest batch: {theirs:g}; the floor: 1)."
    )


def _heads_table(table: Mapping[str, Any]) -> str:
    by_heads: dict[int, dict[str, Any]] = {}
    for row in table["rows"]:
        by_heads.setdefault(row["kv_heads"], {})[row["contender"]] = row
    lines = []
    for heads, rows in by_heads.items():
        ours, first, second = (rows[name] for name in ("kvjax", "head-major", "token-major"))
        lines.append(
            [
                str(heads),
                f"{ours['bytes_per_step'] / 1e6:.1f}",
                f"{ours['intensity_flop_per_byte']:g}",
                f"{ours['median_seconds'] * 1e3:.2f}",
                f"{ours['bytes_per_second'] / 1e9:.1f}",
                f"{ours['share_of_floor']:.0%}",
                f"{first['median_seconds'] * 1e3:.2f}",
                f"{second['median_seconds'] * 1e3:.2f}",
            ]
        )
    return markdown_table(
        [
            *("KV heads", "MB", "FLOP/B", "kvjax ms", "GB/s", "of floor"),
            *("(B, K, S, H) at once, ms", "(B, S, K, H) at once, ms"),
        ],
        lines,
    )


def _heads_says(table: Mapping[str, Any], theirs: float) -> str:
    def seconds(name: str, heads: int) -> float:
        rows = table["rows"]
        (row,) = (r for r in rows if (r["contender"], r["kv_heads"]) == (name, heads))
        return row["median_seconds"]

    ours = seconds("kvjax", 8) / seconds("kvjax", 1)
    turned = [seconds("token-major", heads) / seconds("head-major", heads) for heads in (8, 4, 2)]
    return (
        f"From 8 KV heads to 1, an eighth of the bytes: {ours:.2f} times faster (the article's "
        f"kernel: {theirs:g}; its floor: 8). Token-major caches take {min(turned):.1f} to "
        f"{max(turned):.1f} times as long as head-major ones with 2 to 8 KV heads."
    )


def _table(table: Mapping[str, Any]) -> str:
    names = {"batch": "B", "head_dim": "H", "length": "tokens", "kv_heads": "KV heads"}
    return markdown_table(
        [*names.values(), "MB", "ms", "quartiles", "GB/s", "of floor"],
        [
            [
                *(f"{row[name]:,}" for name in names),
                f"{row['bytes_per_step'] / 1e6:.1f}",
                f"{row['median_seconds'] * 1e3:.2f}",
                "-".join(f"{x * 1e3:.2f}" for x in row["quartile_seconds"]),
                f"{row['bytes_per_second'] / 1e9:.1f}",
                f"{row['share_of_floor']:.0%}",
            ]
            for row in table["rows"]
        ],
    )


def gains(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each way of reading fewer bytes gains over MHA in f32, by how many times fewer."""
    base, *others = found["rows"]
    rows = [
        {
            "by": row["by"],
            "fewer": base["bytes_per_step"] / row["bytes_per_step"],
            "faster": base["median_seconds"] / row["median_seconds"],
            "flop_per_byte": row["intensity_flop_per_byte"],
            "ms": row["median_seconds"] * 1e3,
        }
        for row in others
    ]
    return sorted(rows, key=lambda row: row["fewer"])


def _fewer_page(found: Mapping[str, Any]) -> list[str]:
    base, layers = found["rows"][0], found["layers"]
    shared = layers["two layers, two caches"] / layers["two layers, one cache"]
    return [
        f"Steps that write a token and attend to all, over the library's caches; MHA in f32 takes "
        f"{base['median_seconds'] * 1e3:.2f} ms and reads {base['bytes_per_step'] / 1e6:.1f} MB. "
        f"Fewer KV heads mean more work for each byte. A window leaves it as it is; smaller "
        f"numbers leave that for each number, and are decoded.",
        markdown_table(
            ["by", "times fewer bytes", "FLOP/B", "ms", "times faster", "of what it saves"],
            [
                [
                    row["by"],
                    f"{row['fewer']:.2f}",
                    f"{row['flop_per_byte']:.3g}",
                    f"{row['ms']:.2f}",
                    f"{row['faster']:.2f}",
                    f"{row['faster'] / row['fewer']:.0%}",
                ]
                for row in gains(found)
            ],
        ),
        f"Two layers that share one cache are {shared:.2f} times as fast as two with a cache each: "
        f"sharing across layers halves what is kept, and each layer reads as much as before.",
    ]


def draw(figures: Mapping[str, Any]) -> Figure:
    """Time over KV heads; and what fewer bytes gain, by how they became fewer."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_heads(left, figures["tables"][0])
    _draw_gains(right, gains(figures["fewer_bytes"]), figures["published"])
    return figure


def _draw_heads(axes: Axes, table: Mapping[str, Any]) -> None:
    names = {"kvjax": "kvjax", "head-major": "(B, K, S, H) at once"}
    for name, says in {**names, "token-major": "(B, S, K, H) at once"}.items():
        rows = [row for row in table["rows"] if row["contender"] == name]
        heads = [row["kv_heads"] for row in rows]
        axes.plot(heads, [row["median_seconds"] * 1e3 for row in rows], "o-", label=says)
    axes.plot(heads, [row["floor_seconds"] * 1e3 for row in rows], "k--", label="floor")
    axes.set(xscale="log", yscale="log", xlabel="KV heads", ylabel="ms a step")
    axes.set_xticks(heads, labels=[str(n) for n in heads])
    axes.set_xticks([], minor=True)
    axes.set_title(table["name"])
    axes.legend()


def _draw_gains(axes: Axes, rows: list[dict[str, Any]], published: Mapping[str, float]) -> None:
    theirs = {
        "by": "1 KV head: the article's kernel (B300)",
        "fewer": published["sweep.bytes.h8_1"],
        "faster": published[ARTICLE[0]],
    }
    for row in (*rows, theirs):
        at = row["fewer"], row["faster"]
        color = "C3" if row is theirs else "C0" if "KV head" in row["by"] else "C1"
        axes.plot(*at, "o", color=color)
        right = at[0] > 4
        place = {"xytext": (-5 if right else 5, -9), "ha": "right" if right else "left"}
        axes.annotate(row["by"], at, textcoords="offset points", fontsize=7, **place)
    axes.axline((1, 1), (8, 8), color="k", linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="times fewer bytes", ylabel="times faster")
    axes.set_xticks([2, 4, 8], labels=["2", "4", "8"])
    axes.set_xticks([], minor=True)


def notes(figures: Mapping[str, Any]) -> str:
    """On what a run was measured."""
    where = figures["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    rates = [table["bandwidth"]["bytes_per_second"] for table in figures["tables"]]
    memory = ", ".join(
        f"{name} {min(rate[name] for rate in rates) / 1e9:.1f} to "
        f"{max(rate[name] for rate in rates) / 1e9:.1f}"
        for name in rates[0]
    )
    return (
        f"Medians of {figures['sizes']['rounds']} rounds, measured by `{figures['command']}` in "
        f"{figures['seconds']:,.0f} seconds on {where['backend']} ({where['cpu']}, "
        f"{where['threads']} threads, load {where['load_average']}); {versions}. Memory, GB/s over "
        f"the tables: {memory}."
    )

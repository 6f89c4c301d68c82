"""The page and the plot of `mla_work_per_byte.py`, of its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.bench.report import markdown_table

Row = Mapping[str, Any]
ABSORBED, REMADE, STORED = (
    f"MLA, {how}" for how in ("absorbed", "expanded at each step", "expanded in the cache")
)
# The chip whose floors the page shows.
SHOWN = "H200"
FORMULAS = (
    "Of each cached token: the bytes that are kept and read; the FLOP of q·k and p·v "
    "(`kvjax.sizing`), which are 2 N (2 L + R) over latents and 2 N (H + HV) else; those of making "
    "heads' keys and values of it, 2 N L (H + HV); and on which side of each chip's ridge, in "
    "FLOP/B, that is."
)


def page(figures: Mapping[str, Any]) -> list[str]:
    """All tables, with what they say."""
    large, *_ = heads = list(figures["formulas"])
    parts = ["## Does the guess hold?", verdict(figures)]
    parts += ["## By formula", FORMULAS]
    for n in heads:
        parts += [f"### {n} heads, bf16", _formulas(figures, n)]
    parts += [f"## Floors: {large} heads, bf16, {SHOWN}", *_floors(figures)]
    parts += ["## By the compiler", *_counts(figures["counts"])]
    for table in figures["tables"]:
        heads = table["rows"][0]["query_heads"]
        parts += [f"## By the clock: {table['name']}, {heads} heads, f32", _timed(table)]
    return [*parts, _clock_says(figures), notes(figures)]


def verdict(figures: Mapping[str, Any]) -> str:
    """What follows, in sentences."""
    large = next(iter(figures["formulas"]))
    rows, ridges = _by_form(figures["formulas"][large]), figures["ridges"]
    absorbed, remade, stored, mha = (rows[name] for name in (ABSORBED, REMADE, STORED, "MHA"))
    work = absorbed["intensity_flop_per_byte"]
    above = [name for name, ridge in ridges.items() if work > ridge]
    below = [name for name in ridges if name not in above]
    more = _flop(remade) / _flop(absorbed)
    through_memory = remade["bytes"] + 2 * stored["bytes"]
    return (
        f"**No, not for MLA as it is decoded.** Absorbed, all {large} heads read one record, whose "
        f"latent is key and value: {work:.0f} FLOP for each byte, where MHA does "
        f"{mha['intensity_flop_per_byte']:.0f} and MQA "
        f"{rows['MQA']['intensity_flop_per_byte']:.0f}. That is above the ridge of "
        f"{_listed(above)}, where the matrix units bind, and below that of {_listed(below)}, where "
        f"memory does: its yardstick is both.\n\n"
        f"**Yes, if heads' keys and values are what the cache keeps**: "
        f"{stored['intensity_flop_per_byte']:.0f} FLOP/B. But then a token takes "
        f"{stored['bytes']:,} bytes, {stored['bytes'] / absorbed['bytes']:.0f} times as many as "
        f"its latent, and {stored['bytes'] / mha['bytes']:.2f} times as many as with MHA.\n\n"
        f"**Expanding latents anew at each step** reads as little as the absorbed form and "
        f"multiplies {more:.0f} times as much: {remade['intensity_flop_per_byte']:,.0f} FLOP/B, "
        f"above every ridge. If what is expanded is written to memory and read again, it is "
        f"{_flop(remade) / through_memory:.0f}, at {through_memory / remade['bytes']:.0f} times "
        f"the bytes. Either way its products alone take {more:.0f} times as long as the absorbed "
        f"form's.\n\n"
        f"GLA-2 and GTA-4 keep as many bytes as MLA, {absorbed['bytes']:,}, with "
        f"{_work(rows['GLA-2'])} and {_work(rows['GTA-4'])} FLOP/B: below every ridge here."
    )


def _by_form(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["form"]: row for row in rows}


def _flop(row: Row) -> int:
    return row["attention_flop"] + row["expansion_flop"]


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _formulas(figures: Mapping[str, Any], heads: str) -> str:
    ridges = figures["ridges"]
    lines = [
        [
            row["form"],
            f"{row['bytes']:,}",
            f"{row['attention_flop']:,}",
            f"{row['expansion_flop']:,}" if row["expansion_flop"] else "",
            _work(row),
            *(
                "matrix" if row["intensity_flop_per_byte"] > ridge else "memory"
                for ridge in ridges.values()
            ),
        ]
        for row in figures["formulas"][heads]
    ]
    chips = [f"{name} ({ridge:.0f})" for name, ridge in ridges.items()]
    return markdown_table(["form", "bytes", "FLOP", "to expand", "FLOP/B", *chips], lines)


def _floors(figures: Mapping[str, Any]) -> list[str]:
    by_form: dict[str, list[Row]] = {}
    for row in figures["floors"]:
        by_form.setdefault(row["form"], []).append(row)
    steps = next(iter(by_form.values()))
    lines = [
        [
            name,
            *(
                f"{_time(row['seconds'][SHOWN])} ({row['binds'][SHOWN]}, {_work(row)})"
                for row in rows
            ),
        ]
        for name, rows in by_form.items()
    ]
    short, long = by_form[ABSORBED][0], by_form[ABSORBED][-1]
    return [
        "The least time of a step of one layer's attention, the ceiling that sets it, and FLOP/B, "
        "from the queries to the heads' outputs: the up-projections of latents, which all "
        "sequences share, count. Without them, neither batch nor context changes the work for each "
        "byte; with them, absorbed MLA does "
        f"{short['intensity_flop_per_byte']:.0f} FLOP/B with {_shape(short)} and "
        f"{long['intensity_flop_per_byte']:.0f} with {_shape(long)}.",
        markdown_table(["form", *(_shape(row) for row in steps)], lines),
    ]


def _shape(row: Row) -> str:
    return f"{row['batch']} x {row['tokens']:,} tokens"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _work(row: Row) -> str:
    """FLOP/B."""
    work = row["intensity_flop_per_byte"]
    return f"{work:,.0f}" if work >= 100 else f"{work:.3g}"


def _counts(counts: Sequence[Row]) -> list[str]:
    lines = [
        [
            row["form"],
            str(table["heads"]),
            f"{row['flop']:,}",
            f"{row['counted_flop']:,.0f}",
            f"{row['counted_flop'] / row['flop']:.3f}",
        ]
        for table in counts
        for row in table["rows"]
    ]
    return [
        "FLOP of one more cached token in the compiled step, by XLA's own count. It takes in "
        "softmax, six to eight a score, and a selection for each number of the value, by which "
        "dead slots are silenced: they are a part of the whole where each byte does little work, "
        "and vanish where it does much.",
        markdown_table(["form", "heads", "formula", "counted", "ratio"], lines),
    ]


def _timed(table: Row) -> str:
    base = table["rows"][0]
    peak = table["product_flop_per_second"]
    lines = []
    for row in table["rows"]:
        seconds, matrix = row["median_seconds"], row["flop_per_step"] / peak
        floor = max(row["floor_seconds"], matrix)
        lines.append(
            [
                row["contender"],
                f"{row['bytes_per_step'] / 1e6:.1f}",
                _work(row),
                f"{seconds * 1e3:,.2f}",
                "-".join(f"{x * 1e3:,.2f}" for x in row["quartile_seconds"]),
                f"{seconds / base['median_seconds']:.2f}",
                f"{row['bytes_per_second'] / 1e9:.3g}",
                f"{row['flop_per_step'] / seconds / 1e9:.3g}",
                "matrix" if matrix > row["floor_seconds"] else "memory",
                f"{floor / seconds:.0%}",
            ]
        )
    return markdown_table(
        [
            *("form", "MB", "FLOP/B", "ms", "quartiles", "of MHA's time"),
            *("GB/s", "GFLOP/s", "floor", "of floor"),
        ],
        lines,
    )


def _clock_says(figures: Mapping[str, Any]) -> str:
    tables = figures["tables"]
    ridges = [
        table["product_flop_per_second"] / _best(table["bandwidth"]["bytes_per_second"])
        for table in tables
    ]

    def ratios(name: str, base: str) -> str:
        found = []
        for table in tables:
            seconds = {row["contender"]: row["median_seconds"] for row in table["rows"]}
            found.append(seconds[name] / seconds[base])
        return f"{min(found):.2f} to {max(found):.2f}"

    return (
        f"The steps run in modules on a stream of 64 channels, whose parameters are among the "
        f"bytes. The machine's own ridge, a product of square matrices against the fastest of a "
        f"copy, an update and a read in the same rounds, was {min(ridges):.2f} to "
        f"{max(ridges):.2f} FLOP/B. Absorbed MLA took {ratios(ABSORBED, 'MHA')} times as long as "
        f"MHA, {ratios(ABSORBED, 'MQA')} times as long as MQA, and {ratios(ABSORBED, STORED)} "
        f"times as long as over its heads expanded in the cache; expanding them at each step took "
        f"{ratios(REMADE, ABSORBED)} times as long as absorbing. All three gave the same outputs."
    )


def _best(rates: Mapping[str, float]) -> float:
    return max(rates.values())


def notes(figures: Mapping[str, Any]) -> str:
    """On what a run was measured."""
    where, tables = figures["machine"], figures["tables"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    rates = [table["bandwidth"]["bytes_per_second"] for table in tables]
    memory = ", ".join(
        f"{name} {min(rate[name] for rate in rates) / 1e9:.1f} to "
        f"{max(rate[name] for rate in rates) / 1e9:.1f}"
        for name in rates[0]
    )
    products = [table["product_flop_per_second"] / 1e9 for table in tables]
    return (
        f"Medians of {figures['sizes']['rounds']} rounds, each table one run of interleaved "
        f"rounds, measured by `{figures['command']}` in {figures['seconds']:,.0f} seconds on "
        f"{where['backend']} ({where['cpu']}, {where['threads']} threads, load "
        f"{where['load_average']}); {versions}. Memory, GB/s over the tables: {memory}; products, "
        f"GFLOP/s: {min(products):.0f} to {max(products):.0f}."
    )


def draw(figures: Mapping[str, Any]) -> Figure:
    """Work for each byte beside the chips' ridges; and what a step took beside its floors."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_work(left, figures)
    _draw_times(right, figures["tables"][min(1, len(figures["tables"]) - 1)])
    return figure


def _draw_work(axes: Axes, figures: Mapping[str, Any]) -> None:
    heads, rows = next(iter(figures["formulas"].items()))
    names = [row["form"] for row in rows]
    axes.barh(names, [row["intensity_flop_per_byte"] for row in rows])
    for i, (name, ridge) in enumerate(sorted(figures["ridges"].items(), key=lambda item: item[1])):
        axes.axvline(ridge, color=f"C{i + 1}", linestyle="--", linewidth=1, label=name)
    axes.set(xscale="log", xlabel="FLOP/B, bf16", title=f"{heads} heads, and chips' ridges")
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="lower right")


def _draw_times(axes: Axes, table: Row) -> None:
    rows, peak = table["rows"], table["product_flop_per_second"]
    names = [row["contender"] for row in rows]
    axes.barh(names, [row["median_seconds"] * 1e3 for row in rows], color="C9", label="measured")
    axes.plot(
        [row["floor_seconds"] * 1e3 for row in rows], names, "k|", ms=14, label="floor, memory"
    )
    matrix = [row["flop_per_step"] / peak * 1e3 for row in rows]
    axes.plot(matrix, names, "r|", ms=14, label="floor, products")
    axes.set(xscale="log", xlabel="ms a step, f32", title=f"CPU, {table['name']}")
    axes.invert_yaxis()
    axes.legend(fontsize=7)

"""A run of `scripts/bench_gpu.py` as plain data and as lines of text. Needs no package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvjax.bench.gpu.journal import BEGIN, LOST, Entry

# What this library is held to.
LEAST_RATIO, LEAST_SHARE = 6.5, 0.85
OURS = "kvjax"
ALL_OURS = (OURS, "kvjax xla")

_COLUMNS = (
    ("contender", 11),
    ("shape", 56),
    ("us", 10),
    ("GB/s", 7),
    ("of copy", 8),
    ("TFLOP/s", 8),
    ("of peak", 8),
    ("floor us", 10),
    ("of floor", 9),
    ("set MB", 8),
)


def collect(
    entries: Sequence[Entry], published: Mapping[str, float], about: Mapping[str, Any]
) -> dict[str, Any]:
    """A whole run.

    Args:
      entries: of its journal.
      published: the article's figures by the id that `tests/sizing/seed_figures.json` has.
      about: how it was run.
    """

    def of(kind: str) -> list[Entry]:
        found = (entry for entry in entries if entry["kind"] == kind)
        return [{name: x for name, x in entry.items() if name != "kind"} for entry in found]

    checks, lost = of("check"), of(LOST)
    doubtful = doubtful_kernels(entries)
    rows = [row if "error" in row else row | validity(row, doubtful) for row in of("row")]
    begun = {entry["name"] for entry in of(BEGIN)}
    planned = dict.fromkeys(name for plan in of("plan") for name in plan["names"])
    return {
        "subject": "decode attention on a GPU",
        **about,
        "machine": (of("machine") or [{}])[0],
        "bandwidth": of("bandwidth"),
        "failures": list(_failures(checks, lost, rows)),
        "checks": checks,
        "rows": rows,
        "fewer_bytes": fewer_bytes(rows),
        "goals": goals(rows, published),
        "lost": lost,
        "not_run": [name for name in planned if name not in begun],
    }


def doubtful_kernels(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Kernels that failed a check or were lost in one, each with the names of these checks."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        failed = entry["kind"] == "check" and not entry["passed"]
        if failed or (entry["kind"] == LOST and "kernel" in entry):
            found.setdefault(entry["kernel"], []).append(entry["name"])
    return found


def validity(row: Entry, doubtful: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Whether a row's time means anything, and why not."""
    because = list(doubtful.get(row["kernel"], ())) if row["contender"] == OURS else []
    if not row["agrees"]:
        because.append("its output at this shape differs from float64")
    return {"valid": not because, "invalid_because": because}


def _failures(
    checks: Sequence[Entry], lost: Sequence[Entry], rows: Sequence[Entry]
) -> Iterator[str]:
    """What makes a run fail: checks, cases that were lost, and this library's own rows.

    A peer that cannot take part, or is wrong, fails nothing.
    """
    for entry in checks:
        if not entry["passed"]:
            yield f"{entry['name']}: {entry.get('error') or _far(entry)}"
    for entry in lost:
        yield f"{entry['name']}: {entry['reason']}"
    for row in rows:
        if row["contender"] not in (*ALL_OURS, "all"):
            continue
        if "error" in row:
            if not row["error"].startswith("skipped"):
                yield f"{row['point']}, {row['contender']}: {row['error']}"
        elif not row["agrees"]:
            yield f"{row['point']}, {row['contender']}: its output differs from float64"


def _far(check: Entry) -> str:
    if not check["steady"]:
        return "repeated calls differ"
    if check["raced"]:
        return "there is a race"
    pairs = (
        f"{name} {_or_nan(x)} (at most {check['tolerance'][name]:.2g})"
        for name, x in check["difference"].items()
    )
    return "differs from float64: " + ", ".join(pairs)


def fewer_bytes(rows: Sequence[Entry]) -> list[dict[str, Any]]:
    """What reading fewer bytes gains, by how they became fewer, against MHA in bf16.

    Fewer KV heads mean more work for each byte; a window means as much; codes of 8 bits as much
    for each number. Layers that share a cache read it as often as if each had its own.
    """
    mine = [row for row in rows if row["contender"] == OURS and "error" not in row]
    article = [row for row in mine if row["sweep"] == "article"]
    base = next((row for row in article if row["kv_heads"] == row["query_heads"]), None)
    if base is None:
        return []
    others = [row for row in mine if row["sweep"] == "fewer bytes"]
    ways = [
        *((_heads(row["kv_heads"]), row) for row in article if row is not base),
        *((_way(row), row) for row in others if row["codec"] != "bf16" or row["window"]),
    ]
    found = [_gain(by, base, row) for by, row in ways]
    # The chain of the base goes over one cache again and again, as layers that share it do.
    own = [row for row in others if row["codec"] == "bf16" and not row["window"]]
    shared = [_gain("two layers share one cache", row, base) for row in own]
    return sorted(found, key=lambda gain: gain["times_fewer_bytes"]) + shared


def _heads(kv_heads: int) -> str:
    return f"{kv_heads} KV head{'s' * (kv_heads > 1)}"


def _way(row: Entry) -> str:
    codes = "" if row["codec"] == "bf16" else f"{row['codec']}, {row['scales']} scales"
    window = f"window {row['window']}" if row["window"] else ""
    return ", ".join(part for part in (codes, window) if part)


def _gain(by: str, base: Entry, row: Entry) -> dict[str, Any]:
    fewer = base["bytes_per_step"] / row["bytes_per_step"]
    faster = base["median_seconds"] / row["median_seconds"]
    return {
        "by": by,
        "times_fewer_bytes": fewer,
        "flop_per_byte": row["intensity_flop_per_byte"],
        "median_seconds": row["median_seconds"],
        "times_faster": faster,
        "faster_over_fewer": faster / fewer,
        "valid": base["valid"] and row["valid"],
    }


def goals(rows: Sequence[Entry], published: Mapping[str, float]) -> list[dict[str, Any]]:
    """This run beside the article's figures, and what this library is held to."""
    mine = [row for row in rows if row["contender"] == OURS and "error" not in row and row["valid"]]

    def of(sweep: str) -> dict[int, Entry]:
        return {row["kv_heads"]: row for row in mine if row["sweep"] == sweep}

    found: list[dict[str, Any]] = []

    def add(says: str, ours: float, theirs: float | None, least: float | None) -> None:
        holds = None if least is None else ours >= least
        found.append(
            {"says": says, "ours": ours, "published": theirs, "at_least": least, "holds": holds}
        )

    for sweep, name in (("article", "b32.16k"), ("article, long", "b64.64k")):
        line = of(sweep)
        if {1, 8} <= line.keys():
            ratio = line[8]["median_seconds"] / line[1]["median_seconds"]
            theirs = published.get(f"sweep.latency.{name}")
            add(f"{sweep}: times faster from 8 KV heads to 1", ratio, theirs, LEAST_RATIO)
    for heads, row in sorted(of("article").items(), reverse=True):
        group = row["query_heads"] // heads
        theirs = published.get(f"sweep.bandwidth.g{group}")
        add(
            f"article: share of copy bandwidth at G = {group} (theirs: of peak)",
            row["share_of_copy"],
            theirs,
            LEAST_SHARE,
        )
    for heads in (8, 1):
        line = {r["batch"]: r for r in mine if (r["sweep"], r["kv_heads"]) == ("batch", heads)}
        if len(line) > 1:
            alone, most = line[min(line)], line[max(line)]
            ratio = most["tokens_per_second"] / alone["tokens_per_second"]
            says = f"times faster a row from batch {min(line)} to {max(line)}, {_heads(heads)}"
            add(says, ratio, published.get("batching.51x"), None)
    return found


def heading() -> str:
    """Of the lines of rows."""
    return " ".join(
        f"{name:<{width}}" if i < 2 else f"{name:>{width}}"
        for i, (name, width) in enumerate(_COLUMNS)
    )


def line(row: Entry, doubtful: Mapping[str, Sequence[str]]) -> str:
    """A row, or why there is none."""
    cells = [row["contender"], row.get("label", row["point"])]
    if "error" in row:
        widths = (width for _, width in _COLUMNS)
        shown = " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False))
        return f"{shown} {row['error'].splitlines()[0][:200]}"
    peak = row["share_of_matrix_peak"]
    cells += [
        f"{row['median_seconds'] * 1e6:.2f}",
        f"{row['bytes_per_second'] / 1e9:.0f}",
        f"{row['share_of_copy']:.1%}",
        f"{row['flop_per_second'] / 1e12:.2f}",
        "" if peak is None else f"{peak:.1%}",
        f"{row['floor_seconds'] * 1e6:.2f}",
        f"{row['share_of_floor']:.1%}",
        f"{row['working_set_bytes'] / 1e6:.0f}",
    ]
    shown = " ".join(
        f"{cell:<{width}}" if i < 2 else f"{cell:>{width}}"
        for i, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
    )
    return shown if validity(row, doubtful)["valid"] else f"{shown} INVALID"


def summary(figures: Mapping[str, Any]) -> Iterator[str]:
    """What is said at the end."""
    if figures["fewer_bytes"]:
        yield "\nWhat fewer bytes gain over MHA in bf16; 100 % where it gains as much as it saves"
        yield f"{'by':<42} {'fewer':>6} {'FLOP/B':>7} {'us':>10} {'faster':>7} {'of it':>6}"
        for gain in figures["fewer_bytes"]:
            yield (
                f"{gain['by']:<42} {gain['times_fewer_bytes']:>6.2f} {gain['flop_per_byte']:>7.2f} "
                f"{gain['median_seconds'] * 1e6:>10.2f} {gain['times_faster']:>7.2f} "
                f"{gain['faster_over_fewer']:>6.0%}{'' if gain['valid'] else ' INVALID'}"
            )
    if figures["goals"]:
        yield f"\n{'':<62} {'ours':>7} {'article':>8} {'goal':>7}"
    for goal in figures["goals"]:
        theirs = "" if goal["published"] is None else f"{goal['published']:.3g}"
        least = "" if goal["at_least"] is None else f">= {goal['at_least']:.3g}"
        verdict = {True: "holds", False: "MISSED", None: ""}[goal["holds"]]
        yield f"{goal['says']:<62} {goal['ours']:>7.3g} {theirs:>8} {least:>7} {verdict}"
    checks = figures["checks"]
    yield f"\n{sum(check['passed'] for check in checks)} of {len(checks)} checks passed"
    if figures["not_run"]:
        yield f"\nnot run for want of time: {len(figures['not_run'])}"
        yield from (f"  {name}" for name in figures["not_run"])
    if figures["failures"]:
        yield f"\nFAILURES: {len(figures['failures'])}"
        yield from (f"  {failure}" for failure in figures["failures"])


def check_line(check: Entry) -> str:
    """A check, in one line."""
    if "error" in check:
        said = check["error"].splitlines()[0][:200]
    else:
        far = check["difference"]
        said = f"out {_or_nan(far['out']):>8}  lse {_or_nan(far['lse']):>8}"
        said += "" if check["steady"] else "  repeated calls differ"
        said += "  there is a race" if check["raced"] else ""
    return f"{'ok' if check['passed'] else 'FAILED':<7} {check['name']:<36} {said}"


def _or_nan(x: float | None) -> str:
    return "NaN" if x is None else f"{x:.2g}"

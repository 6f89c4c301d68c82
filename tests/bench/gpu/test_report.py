"""What a run says, from entries of a journal that are made up."""

import pytest

from kvjax.bench.gpu import report

PUBLISHED = {
    "sweep.latency.b32.16k": 2.38,
    "sweep.bandwidth.g1": 0.746,
    "sweep.bandwidth.g8": 0.221,
    "batching.51x": 51,
}


def row(sweep, kv_heads, microseconds, **changes):
    """A row of the article's shape on a device that copies 4 TB/s."""
    nbytes = changes.pop("nbytes", kv_heads * 10**8)
    seconds, flop = microseconds * 1e-6, 8 * 10**8
    return {
        "kind": "row",
        "contender": "kvjax",
        "sweep": sweep,
        "point": f"{sweep}: K{kv_heads} {changes}",
        "label": f"K{kv_heads}",
        "kernel": "bf16",
        "query_heads": 8,
        "kv_heads": kv_heads,
        "batch": 32,
        "codec": "bf16",
        "scales": None,
        "window": None,
        "bytes_per_step": nbytes,
        "intensity_flop_per_byte": flop / nbytes,
        "median_seconds": seconds,
        "bytes_per_second": nbytes / seconds,
        "tokens_per_second": 32 / seconds,
        "share_of_copy": nbytes / seconds / 4e12,
        "flop_per_second": flop / seconds,
        "share_of_matrix_peak": None,
        "floor_seconds": nbytes / 4e12,
        "share_of_floor": nbytes / 4e12 / seconds,
        "working_set_bytes": nbytes,
        "agrees": True,
        **changes,
    }


def check(name, passed=True, **changes):
    return {
        "kind": "check",
        "name": name,
        "kernel": "bf16",
        "passed": passed,
        "steady": True,
        "raced": False,
        "difference": {"out": 0.001, "lse": None},
        "tolerance": {"out": 0.01, "lse": 0.01},
        **changes,
    }


SWEEP = [
    row("article", 8, 220),
    row("article", 4, 110),
    row("article", 2, 60),
    row("article", 1, 40),
    row("fewer bytes", 8, 44, window=2048, nbytes=10**8),
    row("fewer bytes", 8, 130, codec="fp8_e4m3", scales="head", nbytes=4 * 10**8),
    row("fewer bytes", 8, 230),
    row("batch", 8, 10, batch=1, tokens_per_second=1e5),
    row("batch", 8, 2000, batch=512, tokens_per_second=2e5),
]


def collected(*entries):
    return report.collect(entries, PUBLISHED, {"seconds": 1.0})


def test_fewer_bytes_by_how_they_became_fewer():
    table = {gain["by"]: gain for gain in collected(*SWEEP)["fewer_bytes"]}
    assert list(table) == [
        "4 KV heads",
        "fp8_e4m3, head scales",
        "2 KV heads",
        "1 KV head",
        "window 2048",
        "two layers share one cache",
    ]
    heads, window = table["1 KV head"], table["window 2048"]
    assert (heads["times_fewer_bytes"], heads["times_faster"]) == (8, 5.5)
    assert (window["times_fewer_bytes"], window["times_faster"]) == (8, 5)
    assert heads["faster_over_fewer"] == pytest.approx(5.5 / 8)
    assert (heads["flop_per_byte"], table["4 KV heads"]["flop_per_byte"]) == (8, 2)
    shared = table["two layers share one cache"]
    assert (shared["times_fewer_bytes"], shared["times_faster"]) == (1, pytest.approx(230 / 220))
    assert collected(SWEEP[1])["fewer_bytes"] == []


def test_goals_stand_beside_the_article():
    goals = {goal["says"]: goal for goal in collected(*SWEEP)["goals"]}
    ratio = goals["article: times faster from 8 KV heads to 1"]
    assert (ratio["ours"], ratio["published"], ratio["holds"]) == (5.5, 2.38, False)
    shares = [
        goals[f"article: share of copy bandwidth at G = {g} (theirs: of peak)"]
        for g in (1, 2, 4, 8)
    ]
    assert [goal["holds"] for goal in shares] == [True, True, False, False]
    assert [goal["published"] for goal in shares] == [0.746, None, None, 0.221]
    batching = goals["times faster a row from batch 1 to 512, 8 KV heads"]
    assert (batching["ours"], batching["published"], batching["holds"]) == (2, 51, None)


def test_a_failed_check_makes_its_kernels_times_invalid():
    other = row("pages", 8, 50, kernel="bf16, pages")
    peer = row("peers", 8, 50, contender="jax cudnn")
    figures = collected(check("check: a"), check("check: b", passed=False), *SWEEP, other, peer)
    valid = {(r["kernel"], r["contender"]): r["valid"] for r in figures["rows"]}
    assert valid == {
        ("bf16", "kvjax"): False,
        ("bf16, pages", "kvjax"): True,
        ("bf16", "jax cudnn"): True,
    }
    assert figures["rows"][0]["invalid_because"] == ["check: b"]
    assert figures["goals"] == []
    assert not any(gain["valid"] for gain in figures["fewer_bytes"])
    assert figures["failures"] == [
        "check: b: differs from float64: out 0.001 (at most 0.01), lse NaN (at most 0.01)"
    ]
    doubtful = report.doubtful_kernels([check("check: b", passed=False)])
    assert report.line(SWEEP[0], doubtful).endswith("INVALID")
    assert not report.line(SWEEP[0], {}).endswith("INVALID")


def test_a_kernel_that_was_lost_in_a_check_is_doubtful_and_one_lost_in_timing_is_not():
    lost = {"kind": "lost", "name": "check: a", "kernel": "bf16", "reason": "it hung"}
    figures = collected(lost, SWEEP[0])
    assert figures["failures"] == ["check: a: it hung"]
    assert not figures["rows"][0]["valid"]
    figures = collected({"kind": "lost", "name": "article: B1", "reason": "it hung"}, SWEEP[0])
    assert figures["failures"] == ["article: B1: it hung"]
    assert figures["rows"][0]["valid"]


def test_failures_are_ours_or_wrong_outputs():
    def failed(contender, error):
        return {"kind": "row", "contender": contender, "point": "p", "sweep": "s", "error": error}

    figures = collected(
        failed("jax cudnn", "RuntimeError: none"),
        failed("kvjax", "skipped: it needs 9 GB, and 1 GB are free"),
        failed("kvjax", "ValueError: refused"),
        failed("all", "OSError: lost"),
        row("peers", 8, 9, contender="torch sdpa", point="p", agrees=False),
        row("peers", 8, 9, contender="kvjax xla", point="p", agrees=False),
        check("check: c", passed=False, steady=False),
        check("check: e", passed=False, raced=True),
        check("check: d", passed=False, error="RuntimeError: RACE DETECTED\nmore"),
    )
    assert figures["failures"] == [
        "check: c: repeated calls differ",
        "check: e: there is a race",
        "check: d: RuntimeError: RACE DETECTED\nmore",
        "p, kvjax: ValueError: refused",
        "p, all: OSError: lost",
        "p, kvjax xla: its output differs from float64",
    ]


def test_what_was_not_begun_is_listed():
    plans = [{"kind": "plan", "names": ["a", "b"]}, {"kind": "plan", "names": ["a", "b", "c"]}]
    figures = collected(*plans, {"kind": "begin", "name": "b"})
    assert figures["not_run"] == ["a", "c"]
    assert "not run for want of time: 2" in "\n".join(report.summary(figures))


def test_lines_have_fixed_columns():
    heading = report.heading()
    first, second = (report.line(row("article", k, 3 * k), {}) for k in (8, 1))
    assert len(heading) == len(first) == len(second)
    assert first.split() == [
        "kvjax",
        "K8",
        "24.00",
        "33333",
        "833.3%",
        "33.33",
        "200.00",
        "833.3%",
        "800",
    ]
    failed = {"contender": "jax cudnn", "point": "p", "error": "RuntimeError: no\ntrace"}
    assert report.line(failed, {}).endswith(" RuntimeError: no")
    assert report.check_line(check("check: a")).split() == [
        *("ok", "check:", "a", "out", "0.001", "lse", "NaN"),
    ]


def test_the_summary_names_every_failure():
    figures = collected(*SWEEP, check("check: a"), check("check: b", passed=False))
    said = "\n".join(report.summary(figures))
    assert "1 of 2 checks passed" in said
    assert "FAILURES: 1\n  check: b: differs" in said
    assert "two layers share one cache" in said
    said = "\n".join(report.summary(collected(*SWEEP)))
    assert "MISSED" in said
    assert "FAILURES" not in said

import json

import matplotlib.image
import pytest

from kvjax.bench import machine, plots, report

FLOOR = {"f32": 2e-3, "bf16": 1e-3}


def row(contender, kv_heads=8, length=1024, codec="f32", milliseconds=4.0):
    seconds = milliseconds / 1e3
    return {
        "contender": contender,
        "batch": 4,
        "kv_heads": kv_heads,
        "length": length,
        "capacity": 2048,
        "codec": codec,
        "median_seconds": seconds,
        "quartile_seconds": [seconds * 0.9, seconds * 1.2],
        "bytes_per_second": 12.3e9,
        "intensity_flop_per_byte": 2.0,
        "floor_seconds": FLOOR[codec],
        "share_of_floor": FLOOR[codec] / seconds,
        "seconds_over_kvjax": milliseconds / 4,
    }


def run(*rows, **more):
    return {
        "subject": "decode attention",
        "machine": machine.describe(),
        "settings": {"rounds": 7, "seed": 0},
        "bandwidth": {
            "bytes_per_second": {"copy": 1e10, "update": 2e10, "read": 1.5e10},
            "yardstick": "update",
        },
        "absent": {"torch": "not installed"},
        "rows": list(rows),
        **more,
    }


BOUNDS = [
    {"says": "quick", "ratio": 0.2, "most": 0.25, "holds": True},
    {"says": "as quick", "ratio": 1.234, "most": 1.1, "holds": False},
    {"says": "quicker", "ratio": None, "most": 1.1, "holds": None},
]


def test_table_tells_rows_apart_and_notes_say_the_rest():
    figures = run(row("kvjax"), row("jax.nn", milliseconds=10.0))
    head, rows = report.table(figures)
    assert head[:3] == ["contender", "ms", "quartiles"]
    assert dict(zip(head, rows[1], strict=True)) == {
        "contender": "jax.nn",
        "ms": "10",
        "quartiles": "9-12",
        "GB/s": "12.3",
        "FLOP/B": "2",
        "floor ms": "2",
        "of floor": "20%",
        "/ kvjax": "2.5",
    }
    notes = "\n".join(report.notes(figures))
    assert "B 4, K 8, live 1024, slots 2048, codec f32" in notes
    assert "copy 10, update 20, read 15" in notes
    assert "torch, not installed" in notes


def test_printed_without_cuts(capsys):
    report.print_tables(run(row("kvjax"), row("jax.nn", kv_heads=1, codec="bf16"), bounds=BOUNDS))
    printed = capsys.readouterr().out
    assert "…" not in printed
    for text in ("jax.nn", "bf16", "holds", "MISSED", "not measured", "1.23"):
        assert text in printed


def test_markdown():
    page = report.markdown(run(row("kvjax"), bounds=BOUNDS), ["a.png"])
    assert page.startswith("# Decode attention\n\n| ms |")
    assert "\n| as quick | 1.23 | 1.1 | MISSED |\n" in page
    assert page.endswith("![a.png](a.png)\n")


def test_files_appear_whole(tmp_path, monkeypatch):
    figures = run(row("kvjax"), row("kvjax", kv_heads=1))
    files = report.write(figures, tmp_path / "new" / "directory")
    names = ["decode_attention.json", "decode_attention.md", "decode_attention_kv_heads.png"]
    assert [path.name for path in files] == [*names, "decode_attention_bandwidth.png"]
    assert json.loads(files[0].read_text()) == figures
    assert "](decode_attention_kv_heads.png)" in files[1].read_text()
    before = files[0].read_text()

    def full_disk(self, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(type(tmp_path), "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        report.write(run(row("jax.nn")), tmp_path / "new" / "directory")
    assert files[0].read_text() == before
    assert not list(tmp_path.rglob(".*partial"))


def test_plots_show_what_varies(tmp_path):
    varied = [
        row(contender, kv_heads, length, codec)
        for contender in ("kvjax", "jax.nn")
        for codec in ("f32", "bf16")
        for kv_heads in (8, 1)
        for length in (1024, 2048)
    ]
    paths = plots.draw(run(*varied), tmp_path, "run")
    assert [p.name for p in paths] == ["run_kv_heads.png", "run_length.png", "run_bandwidth.png"]
    for path in paths:
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 200
        assert image[..., :3].std() > 0.02  # not blank
    assert [p.name for p in plots.draw(run(row("kvjax")), tmp_path, "one")] == ["one_bandwidth.png"]


def test_panels_are_shapes_and_lines_are_contenders():
    rows = [
        row("kvjax", 8, milliseconds=4),
        row("kvjax", 1, milliseconds=1),
        row("jax.nn", 8),
        row("jax.nn", 1),
        row("torch", 8),  # one point is no line
        row("kvjax", 8, codec="bf16"),
        row("kvjax", 1, codec="bf16"),
    ]
    f32, bf16 = plots.panels(rows, "kv_heads").values()
    assert [line[0]["contender"] for line in f32.values()] == ["kvjax", "jax.nn"]
    assert [r["median_seconds"] for r in next(iter(f32.values()))] == [1e-3, 4e-3]
    assert [[r["kv_heads"] for r in line] for line in bf16.values()] == [[1, 8]]


def test_models_that_differ_in_kv_heads_make_one_line():
    rows = [{**row("kvjax", heads), "model": f"{heads} heads"} for heads in (8, 1)]
    assert plots.panels(rows, "kv_heads") == {}
    (lines,) = plots.panels(rows, "kv_heads", ignore=("model",)).values()
    assert [[r["kv_heads"] for r in line] for line in lines.values()] == [[1, 8]]

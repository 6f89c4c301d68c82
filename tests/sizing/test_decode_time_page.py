"""The figures of docs/decode_time.md are those that the library computes."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script():
    path = ROOT / "scripts" / "decode_time_page.py"
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def test_page_is_what_the_library_computes():
    script, page = load_script(), (ROOT / "docs" / "decode_time.md").read_text()
    assert script.rewritten(page) == page
    assert all(f"<!-- begin {name} -->" in page for name in script.BLOCKS)


def test_a_changed_figure_is_noticed():
    script, page = load_script(), (ROOT / "docs" / "decode_time.md").read_text()
    assert "**33.6 µs**" in page
    assert script.rewritten(page.replace("**33.6 µs**", "**33.7 µs**")) == page

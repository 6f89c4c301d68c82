"""What an import costs, in fresh interpreters."""

import subprocess
import sys

import pytest

import kvjax


def modules_after(code: str) -> set[str]:
    """Names of the top-level packages that are loaded after running `code`."""
    program = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_import_and_sizing_need_only_the_standard_library():
    loaded = modules_after("import kvjax; kvjax.sizing.CHIPS")
    assert "kvjax" in loaded
    assert loaded - set(sys.stdlib_module_names) <= {"kvjax", *modules_after("")}


def test_parts_are_listed_and_unknown_names_refused():
    assert {"sizing", "cache", "ops", "nn", "models", "convert", "train"} <= set(dir(kvjax))
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = kvjax.attention

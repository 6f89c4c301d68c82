"""``python -m kvjax``: the same as the ``kvjax`` command."""

from kvjax.cli import app

if __name__ == "__main__":
    app(prog_name="kvjax")

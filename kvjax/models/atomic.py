"""Directories that appear whole or not at all."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def require_free(dst: Path) -> None:
    """FileExistsError unless a directory can appear at `dst`: nothing is there, or an empty one."""
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise FileExistsError(f"{dst} exists already; name a new or an empty directory")
    if dst.is_mount():
        raise FileExistsError(f"{dst} is a mount point; name a directory below it")


@contextmanager
def atomic_directory(dst: Path) -> Iterator[Path]:
    """A new directory that becomes `dst` (absolute) if the block succeeds and vanishes if not."""
    require_free(dst)
    existing = next(parent for parent in dst.parents if parent.exists())
    partial = existing / f".{dst.name}.partial-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        yield partial
        dst.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(dst)
    except BaseException:
        shutil.rmtree(partial)
        raise

"""Checkpoints of a run, through orbax: the newest alone, and whole or not at all.

A checkpoint is a directory with one item for each pytree, a flat dict of arrays by dotted path, and
one of JSON, "progress". orbax writes to a temporary directory, renames it when all is there, and
deletes the previous checkpoint only then.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax import Array


class Checkpoints:
    """The checkpoints in a directory, which is made if need be; for a `with` block."""

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = Path(directory).resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._manager.close()

    @property
    def step(self) -> int | None:
        """The step of the newest complete checkpoint; None where there is none."""
        return self._manager.latest_step()

    @property
    def path(self) -> Path:
        """Its directory."""
        return self._directory / str(self.step)

    def __contains__(self, item: str) -> bool:
        """Whether the newest checkpoint has the item."""
        return (self.path / item).is_dir()

    def save(self, step: int, trees: dict[str, Any], progress: dict[str, Any]) -> None:
        """Write a checkpoint of pytrees of arrays, by item name; returns when it is complete."""
        items = {item: ocp.args.StandardSave(_by_path(tree)) for item, tree in trees.items()}
        self._manager.save(
            step, args=ocp.args.Composite(progress=ocp.args.JsonSave(progress), **items)
        )

    def progress(self) -> dict[str, Any]:
        """The JSON of the newest checkpoint."""
        return self._restore("progress", ocp.args.JsonRestore())

    def restore(self, item: str, like: Any) -> Any:
        """A pytree of the newest checkpoint, in the structure, dtypes and shardings of `like`."""
        shapes = _by_path(like)
        arrays = self._restore(item, ocp.args.StandardRestore(shapes))
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in shapes])

    def _restore(self, item: str, args: ocp.args.CheckpointArgs) -> Any:
        return self._manager.restore(self.step, args=ocp.args.Composite(**{item: args}))[item]


def _by_path(tree: Any) -> dict[str, Array]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys, simple=True, separator="."): leaf for keys, leaf in leaves}

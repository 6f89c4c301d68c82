"""Hugging Face model directories: weights read tensor by tensor, and written so.

Names, shapes and dtypes are those of the files; what a tensor means is its family's business.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvjax.models import tensorfile
from kvjax.models.atomic import atomic_directory
from kvjax.models.tensorfile import Slot, TensorSpec
from kvjax.sizing import read_config

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Of caches in 8-bit floats, calibrated on one set of weights and wrong for any other.
SCALES_FILE = "kv_cache_scales.json"
_WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
}


class Checkpoint:
    """The weights and config of a Hugging Face model directory, read tensor by tensor.

    Opening reads the headers of all shards and checks them against each other and the index.

    Args:
      directory: holds config.json and either model.safetensors or model.safetensors.index.json
        with its shards. Where both kinds are there, the single file counts, as in transformers.

    Attributes:
      directory: the directory as a Path.
      shards: per shard, the specs of its tensors in the order of their bytes: a plan for
        `CheckpointWriter` that keeps the sharding.

    Raises:
      FileNotFoundError: the directory, its safetensors weights or a shard of the index is missing.
      ValueError: a file is truncated or malformed, or the index and the shards disagree.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        weight_map = _find_weights(self.directory)
        files = [_SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        _require_files(self.directory, files)
        shards = {file: tensorfile.find_slots(self.directory / file) for file in files}
        if weight_map is not None:
            _compare_with_index(self.directory, weight_map, shards)
        self.shards = tuple(tuple(slot.spec for slot in slots) for slots in shards.values())
        self._slots = {slot.spec.name: slot for slots in shards.values() for slot in slots}

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return read_config(self.directory)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, shard by shard."""
        return tuple(self._slots)

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slot(name).spec.shape

    def dtype(self, name: str) -> np.dtype:
        """The stored dtype; bf16 and fp8 are those of ml_dtypes."""
        return self._slot(name).spec.dtype

    def read(self, name: str) -> np.ndarray:
        """One tensor in memory of its own, in the stored dtype and shape."""
        return self.view(name).copy()

    def view(self, name: str) -> np.ndarray:
        """One tensor as it lies in the file: mapped, read-only, to copy or convert it at once.

        The mapping covers this tensor alone and ends with the array, so that streaming through a
        checkpoint keeps one tensor resident. Do not hold it: it dies with the file.
        """
        return tensorfile.view(self._slot(name))

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:
            raise KeyError(f"{self.directory} holds no tensor {name!r}")
        return self._slots[name]


class CheckpointWriter:
    """Writes a Hugging Face model directory tensor by tensor.

    Everything goes to a hidden directory beside `dst`, which is renamed to `dst` when the `with`
    block ends well and removed when it does not; `dst` is never seen half-written.

        with CheckpointWriter(dst, plan, config) as writer:
            for name in source.names():
                writer.write(name, source.view(name))
            copy_side_files(source.directory, writer.directory)

    Args:
      dst: the directory to make; it may exist if it is empty.
      plan: per shard, the specs of its tensors. All shards' headers are written from it at once,
        so that tensors may then come in any order. One shard becomes model.safetensors, several
        become model-0000X-of-0000N.safetensors with an index.
      config: written as config.json.

    Attributes:
      directory: the hidden directory, for further files.

    Raises:
      FileExistsError: `dst` is a file or a directory that is not empty.
      ValueError: what is written is not what was planned: name, dtype, shape or completeness.
      OSError: writing failed, for example for want of space; names the tensor.
    """

    directory: Path

    def __init__(
        self,
        dst: str | os.PathLike[str],
        plan: Iterable[Iterable[TensorSpec]],
        config: Mapping[str, Any],
    ):
        self._dst = Path(dst).resolve()
        self._plan = list(plan)
        self._config = config

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # a header that cannot be written must leave nothing either
            self.directory = stack.enter_context(atomic_directory(self._dst))
            stack.push(self._require_all_written)
            self._slots = self._start_files()
            self._missing = set(self._slots)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)

    def write(self, name: str, values: np.ndarray) -> None:
        """Writes a tensor of the planned dtype and shape."""
        if name not in self._missing:
            state = "already written" if name in self._slots else "not in the plan"
            raise ValueError(f"tensor {name} is {state}")
        slot = self._slots[name]
        _check_against_plan(values, slot.spec)
        try:
            tensorfile.write(slot, values)
        except OSError as error:
            message = f"{error.strerror} while writing tensor {name}; {self._dst} was not made"
            raise OSError(error.errno, message) from error
        self._missing.remove(name)

    def _start_files(self) -> dict[str, Slot]:
        """Writes all but the tensors; returns where each of them goes."""
        count = len(self._plan)
        slots: dict[str, Slot] = {}
        for number, specs in enumerate(self._plan, start=1):
            file = _SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            placed = tensorfile.create(self.directory / file, specs)
            slots |= {slot.spec.name: slot for slot in placed}
        if count > 1:
            _write_json(self.directory / _INDEX, _index(slots.values()))
        _write_json(self.directory / "config.json", self._config)
        return slots

    def _require_all_written(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None and self._missing:
            raise ValueError(f"{self._dst}: planned but not written: {_listing(self._missing)}")


def split_into_shards(
    specs: Iterable[TensorSpec], max_shard_bytes: int = 5_000_000_000
) -> list[list[TensorSpec]]:
    """A plan for `CheckpointWriter`: `specs` in order, cut before a shard passes the limit.

    A tensor larger than `max_shard_bytes` gets a shard of its own.
    """
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def copy_side_files(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Copies what belongs to a model beside weights and config.

    That is the tokenizer, chat templates, generation config, licence and so on: every file of the
    directory `src` itself that is no weights, no index of weights, not config.json and no scales
    calibrated on the weights, and the subdirectory in which transformers keeps further chat
    templates.
    """
    for path in Path(src).iterdir():
        if path.is_file() and not _is_weights_or_config(path.name) and path.name != SCALES_FILE:
            shutil.copyfile(path, Path(dst, path.name))
    templates = Path(src, "additional_chat_templates")
    if templates.is_dir():
        shutil.copytree(templates, Path(dst, templates.name))


def _is_weights_or_config(file: str) -> bool:
    is_index = file.endswith(".index.json")
    return file == "config.json" or is_index or Path(file).suffix in _WEIGHT_SUFFIXES


def _find_weights(directory: Path) -> dict[str, str] | None:
    """The index's map of tensor to shard, or None where a single file holds all weights."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    if (directory / _SINGLE).is_file():
        return None
    index = directory / _INDEX
    if index.is_file():
        return _read_weight_map(index)
    message = f"{directory} holds neither {_SINGLE} nor {_INDEX}"
    if binaries := sorted(path.name for path in directory.glob("*.bin")):
        message += (
            f", only {_listing(binaries)}; convert it to safetensors first"
            " (transformers: from_pretrained, then save_pretrained)"
        )
    raise FileNotFoundError(message)


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_config(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to shards")
    return weight_map


def _require_files(directory: Path, files: Iterable[str]) -> None:
    if missing := [file for file in files if not (directory / file).is_file()]:
        raise FileNotFoundError(f"{directory}: {_INDEX} names missing shards: {_listing(missing)}")


def _compare_with_index(
    directory: Path, weight_map: Mapping[str, str], shards: Mapping[str, Sequence[Slot]]
) -> None:
    indexed = set(weight_map.items())
    stored = {(slot.spec.name, file) for file, slots in shards.items() for slot in slots}
    for extra, where in (
        (indexed - stored, f"in {_INDEX} but not in the shard it names"),
        (stored - indexed, f"in a shard but not in {_INDEX}"),
    ):
        if extra:
            pairs = (f"{name} ({file})" for name, file in extra)
            raise ValueError(f"{directory}: tensors {where}: {_listing(pairs)}")


def _check_against_plan(values: np.ndarray, spec: TensorSpec) -> None:
    if (values.dtype, values.shape) != (spec.dtype, spec.shape):
        raise ValueError(
            f"tensor {spec.name} is {values.dtype}{list(values.shape)},"
            f" planned as {spec.dtype}{list(spec.shape)}"
        )


def _index(slots: Iterable[Slot]) -> dict[str, Any]:
    slots = list(slots)
    return {
        "metadata": {"total_size": sum(slot.spec.nbytes for slot in slots)},
        "weight_map": {slot.spec.name: slot.path.name for slot in slots},
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _listing(names: Iterable[str], most: int = 5) -> str:
    names = sorted(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest

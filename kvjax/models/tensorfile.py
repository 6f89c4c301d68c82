"""Safetensors files, tensor by tensor: where each one lies, its values, and a new file's making.

A file is the header's length in 8 little-endian bytes, the header in JSON, then the tensors' bytes
without gaps (https://huggingface.co/docs/safetensors). The safetensors package reads and checks
the headers here. Values do not go through it: its numpy reader lacks fp8, and its `save_file` takes
pointers to all tensors of a file at once, where a checkpoint is to be streamed.
"""

import json
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

# Mapping the pages at once, where the system can, instead of by faults makes copying 1.3x faster.
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class TensorSpec(NamedTuple):
    """A stored tensor without its values."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Slot(NamedTuple):
    """Where a tensor's bytes lie: `offset` bytes into the file at `path`."""

    spec: TensorSpec
    path: Path
    offset: int


def find_slots(path: Path) -> list[Slot]:
    """The tensors of a file in the order of their bytes.

    Raises:
      ValueError: the file is truncated or corrupt, or a dtype has no numpy counterpart.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            # get_slice reads no values, and names dtypes as the file does.
            heads = [(name, file.get_slice(name)) for name in file.offset_keys()]
            specs = [
                TensorSpec(name, _dtype(path, name, head.get_dtype()), tuple(head.get_shape()))
                for name, head in heads
            ]
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file (truncated or corrupt): {error}"
        ) from error
    # safe_open has checked that the tensors fill the file from the header's end without gaps.
    return _place(specs, path, path.stat().st_size - sum(spec.nbytes for spec in specs))


def view(slot: Slot) -> np.ndarray:
    """The tensor as it lies in the file, read-only; only its bytes are mapped."""
    spec, path, offset = slot
    if spec.nbytes == 0:  # an empty range cannot be mapped
        return np.empty(spec.shape, spec.dtype)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset + spec.nbytes - start
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), length, _MAP_FLAGS, mmap.PROT_READ, offset=start)
    return np.frombuffer(mapped, spec.dtype, offset=offset - start).reshape(spec.shape)


def create(path: Path, specs: Iterable[TensorSpec]) -> list[Slot]:
    """Makes a file with a header and no values yet; returns where they go.

    Raises:
      ValueError: the format has no such dtype.
    """
    # Widest dtype first, as safetensors itself orders them: offsets then stay aligned.
    specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header = _header(specs)
    path.write_bytes(header)
    return _place(specs, path, len(header))


def write(slot: Slot, values: np.ndarray) -> None:
    """Writes a tensor of the slot's dtype and shape."""
    # As uint8, because the arrays of ml_dtypes offer no buffer.
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    with open(slot.path, "r+b") as file:
        file.seek(slot.offset)
        file.write(content)


def _dtype(path: Path, name: str, code: str) -> np.dtype:
    if code not in _DTYPES:
        raise ValueError(f"{path}: tensor {name} has dtype {code}; accepted: {', '.join(_DTYPES)}")
    return _DTYPES[code]


def _place(specs: Sequence[TensorSpec], path: Path, offset: int) -> list[Slot]:
    slots = []
    for spec in specs:
        slots.append(Slot(spec, path, offset))
        offset += spec.nbytes
    return slots


def _header(specs: Sequence[TensorSpec]) -> bytes:
    # Readers in transformers ask for a format; the bytes are the same for every framework.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        if spec.dtype not in _CODES:
            raise ValueError(f"tensor {spec.name}: safetensors has no dtype {spec.dtype}")
        start, end = end, end + spec.nbytes
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

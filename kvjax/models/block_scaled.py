"""Checkpoints whose weights are 8-bit floats with one scale for each block of them.

As DeepSeek-V3 is published (arXiv:2412.19437, section 3.3): W is stored as W / s in e4m3, and s,
one f32 number for 128 x 128 of W, beside it under the same name and "_scale_inv".
"""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kvjax.models.checkpoint import Checkpoint

SCALE = "_scale_inv"
_CODES = np.dtype(ml_dtypes.float8_e4m3fn)


class BlockScaledCheckpoint(Checkpoint):
    """A checkpoint that reads such weights as the numbers they stand for, one tensor at a time.

    Args:
      directory: as of `Checkpoint`.
      dtype: of the numbers; products of code and scale are rounded to it once.

    Raises:
      ValueError: the size of blocks is wrong, or a weight has no scales, or not one for each block.
    """

    def __init__(self, directory: str | os.PathLike[str], dtype: DTypeLike = ml_dtypes.bfloat16):
        super().__init__(directory)
        self._dtype = np.dtype(dtype)
        self._block = _block_size(self.config["quantization_config"])
        self._scaled = {name for name in super().names() if super().dtype(name) == _CODES}
        for name in self._scaled:
            self._check_scales(name)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors but the scales."""
        scales = {name + SCALE for name in self._scaled}
        return tuple(name for name in super().names() if name not in scales)

    def dtype(self, name: str) -> np.dtype:
        return self._dtype if name in self._scaled else super().dtype(name)

    def view(self, name: str) -> np.ndarray:
        """As `Checkpoint.view`; of scaled weights their numbers, in memory of their own."""
        stored = super().view(name)
        if name not in self._scaled:
            return stored
        numbers, scales = stored.astype(np.float32), super().view(name + SCALE)
        rows, columns = self._block
        for i, row in enumerate(scales):  # a row of blocks at a time keeps the temporary small
            numbers[i * rows : (i + 1) * rows] *= np.repeat(row, columns)[: numbers.shape[1]]
        return numbers.astype(self._dtype, copy=False)

    def _check_scales(self, name: str) -> None:
        if name + SCALE not in self:
            raise ValueError(
                f"{self.directory}: tensor {name} is {_CODES} and has no {name}{SCALE}"
            )
        shape, given = self.shape(name), self.shape(name + SCALE)
        blocks = tuple(-(-n // block) for n, block in zip(shape, self._block, strict=True))
        if given != blocks:
            raise ValueError(
                f"tensor {name}{SCALE} has shape {list(given)}; blocks of {list(self._block)} in "
                f"{list(shape)} imply {list(blocks)}"
            )


def is_block_scaled(config: dict[str, Any]) -> bool:
    """Whether a config.json describes such a checkpoint."""
    given = config.get("quantization_config") or {}
    return given.get("quant_method") == "fp8" and "weight_block_size" in given


def _block_size(quantization: dict[str, Any]) -> tuple[int, int]:
    given, form = quantization["weight_block_size"], quantization.get("fmt", "e4m3")
    if form != "e4m3":
        raise ValueError(f"quantization_config.fmt: got {form!r}; accepted: 'e4m3'")
    is_pair = isinstance(given, list) and len(given) == 2
    if not is_pair or any(type(n) is not int or n < 1 for n in given):
        raise ValueError(
            f"quantization_config.weight_block_size: got {given!r}; accepted: two whole numbers, "
            f"at least 1"
        )
    return given[0], given[1]

"""Training data: a stream of token ids, cut into sequences that grain serves in a seeded order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvjax.models.tokenizer import load_tokenizer
from kvjax.train.config import UptrainConfig

if TYPE_CHECKING:
    import grain


def read_tokens(
    path: str | os.PathLike[str],
    model_dir: str | os.PathLike[str],
    vocab_size: int,
    at_least: int,
) -> np.ndarray:
    """Token ids of a file, as one stream.

    Args:
      path: a 1-D integer array in a .npy file; raw ids in a .bin file, little-endian uint16 where
        vocab_size <= 2^16 and uint32 above (both are mapped, not read); else UTF-8 text.
      model_dir: where the tokenizer of a text is.
      vocab_size: ids must be below.
      at_least: tokens that are needed.

    Raises:
      ValueError: naming the file: too few tokens, ids outside the vocabulary, not a 1-D array of
        integers, or not UTF-8.
    """
    path = Path(path)
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="r")
    elif path.suffix == ".bin":
        tokens = _map_ids(path, np.dtype("<u2" if vocab_size <= 2**16 else "<u4"))
    else:
        tokens = _tokenize(path, model_dir)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{path} is {tokens.dtype}{list(tokens.shape)}: a 1-D array of integers is needed"
        )
    if len(tokens) < at_least:
        raise ValueError(
            f"{path} is too short: {len(tokens)} tokens, at least {at_least} are needed"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{path} has token ids {low} to {high}; the model's are 0 to {vocab_size - 1}"
        )
    return tokens


def _map_ids(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(f"{path} has {size} bytes, which are not whole {dtype} token ids")
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)


def _tokenize(path: Path, model_dir: str | os.PathLike[str]) -> np.ndarray:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    # No start token: windows of one stream begin anywhere in it.
    return np.array(load_tokenizer(model_dir).encode(text, add_special_tokens=False).ids, np.int32)


class Sequences:
    """A stream cut into sequences of seq_len + 1 tokens, the data source that grain shuffles.

    Neighbours share one token, the last target of one and the first input of the next, so that
    every token but the stream's first is predicted once. The rest at the end is dropped.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int):
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i: int) -> np.ndarray:
        start = i * self.seq_len
        return np.asarray(self.tokens[start : start + self.seq_len + 1], np.int32)


def batches(tokens: np.ndarray, config: UptrainConfig) -> grain.DatasetIterator:
    """Endless batches (batch, seq_len + 1) int32, every epoch in an order of its own.

    The order follows from config.seed alone. `get_state` tells the place in it, in the middle of
    an epoch too, as JSON; `set_state` returns there.
    """
    try:
        import grain
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "training needs the grain library: install kvjax[train]"
        ) from None
    order = grain.MapDataset.source(Sequences(tokens, config.seq_len)).seed(config.seed).shuffle()
    # Slices of one array: threads that read ahead would cost more than they save.
    options = grain.ReadOptions(num_threads=0)
    return iter(order.repeat().batch(config.batch).to_iter_dataset(options))

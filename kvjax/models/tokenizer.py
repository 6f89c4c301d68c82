"""Text to tokens and back, through a model directory's tokenizer.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(model_dir: str | os.PathLike[str]) -> Tokenizer:
    """The directory's tokenizer, of Hugging Face's `tokenizers` library (extra `text`).

    Raises:
      FileNotFoundError: the directory has no tokenizer.json.
      ModuleNotFoundError: `tokenizers` is not installed.
    """
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; give token ids instead of text")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "text needs the tokenizers library: install kvjax[text]"
        ) from None
    return Tokenizer.from_file(str(path))

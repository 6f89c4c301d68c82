"""Generation from text to text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import Progress

from kvjax.engine.generate import generate
from kvjax.engine.sampling import Sampler
from kvjax.models.load import find_model, load
from kvjax.models.tokenizer import load_tokenizer


def generate_text(
    model_dir: str | os.PathLike[str],
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    sampler: Sampler = Sampler(),
    seed: int = 0,
    dtype: str | None = None,
    codec: str = "bf16",
) -> list[str]:
    """Continue each prompt, as one batch, until the model's end-of-text token.

    Shows a progress bar on standard error. Arguments as in `generate` and `models.load`; text goes
    through the directory's tokenizer.json, without a chat template.
    """
    directory = find_model(model_dir)
    tokenizer = load_tokenizer(directory)
    model = load(directory, dtype)
    # config.json gives one id, a list of them, or null.
    eos = json.loads(model.config.source).get("eos_token_id")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("decoding", total=max_new_tokens)
        rows = generate(
            model,
            [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))],
            max_new_tokens,
            sampler=sampler,
            eos=[] if eos is None else np.atleast_1d(eos).tolist(),
            seed=seed,
            codec=codec,
            progress=lambda done: bar.update(task, completed=done),
        )
    return tokenizer.decode_batch(rows)

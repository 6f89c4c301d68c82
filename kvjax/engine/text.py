"""Generation from text to text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from kvjax.cache import LayoutChoice
from kvjax.engine.generate import check, generate
from kvjax.engine.sampling import Sampler
from kvjax.models.load import find_model, load
from kvjax.models.tokenizer import load_tokenizer


class Continuations(NamedTuple):
    """What was generated, and what its cache took.

    Attributes:
      texts: one for each prompt.
      cache_bytes: of the cache, its tables included.
      dense_bytes: of one that stores every token of every layer in bf16.
    """

    texts: list[str]
    cache_bytes: int
    dense_bytes: int


def generate_text(
    model_dir: str | os.PathLike[str],
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    sampler: Sampler = Sampler(),
    seed: int = 0,
    dtype: str | None = None,
    layout: LayoutChoice = "auto",
    codec: str = "bf16",
) -> Continuations:
    """Continue each prompt, as one batch, until the model's end-of-text token.

    Shows a progress bar on standard error. Arguments as in `generate` and `models.load`; text goes
    through the directory's tokenizer.json, without a chat template.
    """
    directory = find_model(model_dir)
    tokenizer = load_tokenizer(directory)
    model = load(directory, dtype)
    # config.json gives one id, a list of them, or null.
    eos = json.loads(model.config.source).get("eos_token_id")
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
    capacity = check(model, ids, max_new_tokens)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("decoding", total=max_new_tokens)
        rows = generate(
            model,
            ids,
            max_new_tokens,
            sampler=sampler,
            eos=[] if eos is None else np.atleast_1d(eos).tolist(),
            seed=seed,
            layout=layout,
            codec=codec,
            progress=lambda done: bar.update(task, completed=done),
        )

    def nbytes(layout: LayoutChoice, codec: str) -> int:
        cache = jax.eval_shape(lambda: model.init_cache(len(ids), capacity, layout, codec))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    texts = tokenizer.decode_batch(rows)
    return Continuations(texts, nbytes(layout, codec), nbytes("dense", "bf16"))

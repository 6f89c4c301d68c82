"""Generation from text to text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from kvjax import sizing
from kvjax.cache import LayoutChoice, Scales
from kvjax.cache.scales import STATIC
from kvjax.engine.compress import Eviction
from kvjax.engine.generate import cache_shapes, check, generate
from kvjax.engine.sampling import Sampler
from kvjax.models.cache_scales import load_scales
from kvjax.models.checkpoint import Checkpoint
from kvjax.models.family import abstract_decoder
from kvjax.models.load import find_model, load
from kvjax.models.registry import read_decoder
from kvjax.models.tokenizer import load_tokenizer


class Continuations(NamedTuple):
    """What was generated, and what its cache took.

    Attributes:
      texts: one for each prompt.
      cache_bytes: of the cache as it was at the end, its tables included.
      peak_bytes: of the largest that was held: with an eviction, mostly the prompts'.
      dense_bytes: of one that stores every token of every layer in bf16.
      scales: what the cache's constant scales are; None where its codec has none.
    """

    texts: list[str]
    cache_bytes: int
    peak_bytes: int
    dense_bytes: int
    scales: str | None


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
    eviction: Eviction | None = None,
) -> Continuations:
    """Continue each prompt, as one batch, until the model's end-of-text token.

    Shows a progress bar on standard error. Arguments as in `generate` and `models.load`; text goes
    through the directory's tokenizer.json, without a chat template. A cache of constant scales gets
    those beside the model (`kvjax.models.cache_scales`), if they are for its codec. What cannot be
    done is refused before weights are read.
    """
    directory = find_model(model_dir)
    tokenizer = load_tokenizer(directory)
    # Shapes in place of the weights tell what is to be refused.
    outline = abstract_decoder(read_decoder(Checkpoint(directory).config)[1])
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
    capacity = check(outline, ids, max_new_tokens)
    cache_shapes(outline, len(ids), capacity, layout, codec, eviction)
    dense = cache_shapes(outline, len(ids), capacity, "dense", "bf16")
    model = load(directory, dtype)
    scales, of_scales = _scales(directory, codec)
    # config.json gives one id, a list of them, or null.
    eos = json.loads(model.config.source).get("eos_token_id")
    held = [0]
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
            scales=scales,
            eviction=eviction,
            progress=lambda done: bar.update(task, completed=done),
            cache_bytes=held.append,
        )
    return Continuations(
        texts=tokenizer.decode_batch(rows),
        cache_bytes=held[-1],
        peak_bytes=max(held),
        dense_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dense)),
        scales=of_scales,
    )


def _scales(directory: Path, codec: str) -> tuple[Scales | None, str | None]:
    """Scales beside the model, if the codec has a use for them, and what there is to say of it."""
    name = sizing.codec(codec).name
    if name not in STATIC:
        return None, None
    scales = load_scales(directory)
    if scales is None:
        return None, "all 1, as none were calibrated"
    if scales.codec != name:
        return None, f"all 1, as those beside the model are for {scales.codec}"
    return scales, f"calibrated on {scales.source}"

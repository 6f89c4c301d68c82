"""Golden file of eviction: what KVPress keeps of one attention layer's keys and values.

    python scripts/make_golden_eviction.py        writes tests/golden/eviction.npz

Needs kvpress with the torch and transformers that it asks for (the file names the versions that it
was made with), and imports nothing of kvjax: the two must agree without sharing code. The layer is
transformers' LlamaAttention with random weights, in float32; the first tokens are larger than
others, as attention sinks of trained models are. The file holds

  q (B, T, N, H), k and v (B, K, T, H)   queries before and keys after their rotation
  theta                                  the rotation's base
  kept_NAME (B, K, n)                    positions that a press keeps, in order; filled up with -1
                                         where heads keep different numbers (adakv)
  pyramid (rows, 4)                      tokens, compression ratio, layer and what PyramidKVPress
                                         keeps of it, for 8 layers and its window of 64
  versions                               of kvpress, torch and transformers
"""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import numpy as np
import torch
import transformers
from kvpress.utils import get_prerope_query_states
from transformers.models.llama import modeling_llama as llama

OUT = Path(__file__).parents[1] / "tests" / "golden" / "eviction.npz"
BATCH, TOKENS, HEADS, KV_HEADS, DIM = 2, 96, 6, 2, 8
THETA, WINDOW, RATIO, SINKS, LAYERS = 1000.0, 8, 0.75, 4, 8
PRESSES = {
    "snapkv": kvpress.SnapKVPress(RATIO, window_size=WINDOW),
    "tova": kvpress.TOVAPress(RATIO),
    "knorm": kvpress.KnormPress(RATIO),
    "keydiff": kvpress.KeyDiffPress(RATIO),
    "expected-attention": kvpress.ExpectedAttentionPress(RATIO, n_sink=SINKS),
    "observed-attention": kvpress.ObservedAttentionPress(RATIO),
    "streaming-llm": kvpress.StreamingLLMPress(RATIO, n_sink=SINKS),
}
PYRAMIDS = ((4096, 0.1), (4096, 0.5), (4096, 0.68), (4096, 0.75), (16384, 0.9))


def layer() -> tuple[Any, dict[str, Any]]:
    """The attention module, and what a press is handed of a forward pass through it."""
    config = transformers.LlamaConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        num_hidden_layers=LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_implementation="eager",
    )
    module = llama.LlamaAttention(config, layer_idx=0)
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape) / math.sqrt(weight.shape[1]) * 1.5)
    module.rotary_emb = llama.LlamaRotaryEmbedding(config)
    hidden = torch.randn(BATCH, TOKENS, HEADS * DIM)
    hidden[:, :SINKS] *= 3
    turn = module.rotary_emb(hidden, torch.arange(TOKENS)[None])
    shape = (BATCH, TOKENS, KV_HEADS, DIM)
    keys, values = (
        project(hidden).view(shape).transpose(1, 2) for project in (module.k_proj, module.v_proj)
    )
    _, keys = llama.apply_rotary_pos_emb(keys, keys, *turn)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    _, attentions = module(hidden, position_embeddings=turn, attention_mask=mask)
    return module, {
        "hidden_states": hidden,
        "keys": keys,
        "values": values,
        "attentions": attentions,
        "kwargs": {"position_embeddings": turn},
    }


def kept(press: Any, module: Any, given: dict[str, Any]) -> np.ndarray:
    scores = press.score(module, **given)
    return scores.topk(round(TOKENS * (1 - RATIO)), dim=-1).indices.sort(-1).values.numpy()


def kept_by_heads(module: Any, given: dict[str, Any]) -> np.ndarray:
    """Of Ada-KV over SnapKV, which marks what attention is to leave out."""
    module.config._attn_implementation = "sdpa"
    press = kvpress.AdaKVPress(PRESSES["snapkv"], alpha_safeguard=0.2)
    press.compress(module, **given)
    stays = np.ones((BATCH, KV_HEADS, TOKENS), bool)
    stays[tuple(np.asarray(index) for index in module.masked_key_indices)] = False
    found = np.full((BATCH, KV_HEADS, int(stays.sum(-1).max())), -1)
    for at in np.ndindex(BATCH, KV_HEADS):
        positions = np.flatnonzero(stays[at])
        found[at][: len(positions)] = positions
    return found


def pyramid() -> np.ndarray:
    config = SimpleNamespace(num_hidden_layers=LAYERS)
    return np.array(
        [
            (tokens, ratio, i, kvpress.PyramidKVPress(ratio).get_layer_budget(module, tokens))
            for tokens, ratio in PYRAMIDS
            for i in range(LAYERS)
            for module in [SimpleNamespace(config=config, layer_idx=i)]
        ]
    )


def main() -> None:
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    module, given = layer()
    q = get_prerope_query_states(module, given["hidden_states"])
    choices: dict[str, Any] = {
        f"kept_{name}": kept(press, module, given) for name, press in PRESSES.items()
    }
    choices["kept_adakv"] = kept_by_heads(module, given)
    versions = {"kvpress": version("kvpress"), "torch": torch.__version__}
    np.savez(
        OUT,
        q=q.transpose(1, 2).numpy(),
        k=given["keys"].numpy(),
        v=given["values"].numpy(),
        theta=np.float32(THETA),
        pyramid=pyramid(),
        **{name: found.astype(np.int32) for name, found in choices.items()},
        versions=str(versions | {"transformers": transformers.__version__}),
    )


if __name__ == "__main__":
    main()

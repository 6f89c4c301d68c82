"""Models that kvjax converted to latent attention, which no other library has a name for.

config.json is that of the source, whose family says what the model is beside its attention, with

- `source_model_type`: the model_type that it had;
- `kv_lora_rank`: L;
- `rope_heads` and `qk_rope_head_dim`: rope keys of a token, and R, the channels of each;
- `rope_pairs`: for each layer, of each pair of rope channels, which of the source's frequencies it
  has: those of all rope keys one after the other;
- `qk_nope_head_dim`: H, channels of a query head that are not rotated.

What follows from the source's fields is not written again: the factor of the scores is that of its
attention, whatever the width of keys is now; windows, RoPE's base and scaling are its own. Where
its q, k and v have biases, so have q, the rope keys (and the latent: 0), and the output, to which
those of values were moved. No norm stands between a token and its latent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kvjax import sizing
from kvjax.models.family import Family, Tensor
from kvjax.models.llama import linear
from kvjax.nn import AttentionConfig, DecoderConfig, LatentAttentionConfig
from kvjax.nn.sharing import AnyAttentionConfig
from kvjax.sizing.families.converted import FIELDS, MODEL_TYPE

# Settings of attention that latent attention has nothing like, and what says that they are unused.
_REFUSED = {
    "qk_norm": "norms of queries and keys do not commute with mixing and dropping channels",
    "sinks": "its heads have logits of their own in the softmax",
    "soft_cap": "its scores are capped",
    "chunk": "its queries see chunks",
    "shares_with": "it reads the keys and values of another layer",
}


def of(source: Family) -> Family:
    """The family of models that were converted from those of another."""
    others = tuple(row for row in source.tensors if ".attention." not in row.path)
    output = [row for row in source.tensors if ".attention.o." in row.path]
    layer = next(row.name for row in output).rsplit(".", 2)[0]
    return replace(
        source,
        model_type=MODEL_TYPE,
        decoder=partial(_decoder, source),
        tensors=(
            *others,
            *linear(f"{layer}.q_proj", "layers.{i}.attention.q"),
            *linear(f"{layer}.kv_a_proj", "layers.{i}.attention.kv_down"),
            Tensor(f"{layer}.k_up", "layers.{i}.attention.k_up"),
            Tensor(f"{layer}.v_up", "layers.{i}.attention.v_up"),
            *output,
        ),
        other_forms=tuple(row for row in source.other_forms if ".attention." not in row.path),
        kv_heads_field=None,
    )


def source_config(config: dict) -> dict[str, Any]:
    """The config of the model that this one was converted from."""
    rest = {name: value for name, value in config.items() if name not in FIELDS}
    return {**rest, "model_type": config["source_model_type"]}


def _decoder(source: Family, config: dict, spec: sizing.ModelSpec) -> DecoderConfig:
    own = source_config(config)
    base = source.decoder(own, sizing.load(own))
    pairs = config["rope_pairs"]
    if not isinstance(pairs, list) or len(pairs) != len(base.attention):
        raise ValueError(
            f"rope_pairs: got {pairs!r}; accepted: a list for each of {len(base.attention)} layers"
        )
    attention = (
        _latent(i, layer, config, chosen)
        for i, (layer, chosen) in enumerate(zip(base.attention, pairs, strict=True))
    )
    return replace(base, attention=tuple(attention))


def _latent(
    index: int, source: AnyAttentionConfig, config: dict, pairs: list[int]
) -> LatentAttentionConfig:
    source = convertible(index, source)
    assert source.rope is not None
    return LatentAttentionConfig(
        d_model=source.d_model,
        query_heads=source.query_heads,
        latent_rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        rope_heads=config["rope_heads"],
        head_dim=config["qk_nope_head_dim"],
        head_value_dim=source.value_dim,
        rope=replace(source.rope, pairs=tuple(pairs)),
        query_bias=source.qkv_bias,
        latent_bias=source.qkv_bias,
        out_bias=source.out_bias or source.qkv_bias,
        latent_norm=False,
        window=source.window,
        scale=source.key_dim**-0.5 if source.scale is None else source.scale,
    )


def convertible(index: int, source: AnyAttentionConfig) -> AttentionConfig:
    """The attention of a layer, if latent attention can be made of it.

    Raises:
      ValueError: names the layer and what is in the way.
    """
    if not isinstance(source, AttentionConfig):
        raise ValueError(f"layer {index} keeps latents already; accepted: keys and values of heads")
    for field, reason in _REFUSED.items():
        given = getattr(source, field)
        if given:
            raise ValueError(
                f"{field} of layer {index}: got {given!r}; accepted for conversion to MLA: none, "
                f"since {reason}"
            )
    if source.rope is None:
        raise ValueError(
            f"rope of layer {index}: got none; accepted for conversion to MLA: rotated keys, of "
            f"which some stay so"
        )
    return source

"""DeepSeek-V4: pools of compressed entries, streams that mix, outputs by low rank."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.moe import DEEPSEEK_MOE
from kvjax.sizing.weights.parts import MLP_BIAS, Site, sinks
from kvjax.sizing.weights.rules import WeightRules
from kvjax.sizing.weights.tables.latent import last_mixing


def _projections(site: Site) -> int:
    """Queries by low rank, one head that is key and value, and outputs by low rank in groups."""
    layer, d_model = site.layer, site.d_model
    width, rank = layer.query_heads * layer.key_dim, layer.query_rank or 0
    groups, out_rank = site.number("o_groups", 8), site.number("o_lora_rank", 1024)
    queries = rank * (d_model + width)
    return queries + d_model * layer.key_dim + out_rank * (width + groups * d_model)


def _compressors(site: Site) -> Weights:
    """Values and gates of each pool's entries, and the queries that pick among an index's."""
    layer, d_model = site.layer, site.d_model
    total = Weights(small=(layer.query_rank or 0) + layer.key_dim)
    for pool in layer.pools:
        wide = pool.width * (1 + pool.overlap)
        total += Weights(mixers=2 * d_model * wide, small=pool.ratio * wide + pool.width)
        if pool.index:
            heads = site.number("index_n_heads", 64)
            queries = (layer.query_rank or 0) * heads * pool.width
            total += Weights(mixers=queries + d_model * heads)
    return total


def _mixing(site: Site) -> Weights:
    """Weights that mix the streams before and after attention and feed-forward layer."""
    streams = site.number("hc_mult", 4)
    widths = (2 + streams) * streams
    return Weights(mixers=2 * widths * streams * site.d_model, small=2 * (widths + 3))


RULES = {
    "deepseek_v4": WeightRules(
        ffn=(
            replace(
                DEEPSEEK_MOE,
                shared="moe_intermediate_size",
                shared_bias=MLP_BIAS,
                where=lambda site: True,
            ),
            _mixing,
        ),
        attention=(sinks, _compressors),
        model=(last_mixing,),
        projections=_projections,
    ),
}

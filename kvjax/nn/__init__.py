"""Attention variants and the decoder built of them, as flax.nnx modules."""

from kvjax.nn.attention import Attention, AttentionConfig
from kvjax.nn.decoder import Decoder, DecoderConfig
from kvjax.nn.latent import LatentAttention, LatentAttentionConfig
from kvjax.nn.mlp import MlpConfig
from kvjax.nn.moe import ClampedSwiglu, Gated, MoeConfig
from kvjax.nn.norm import NormConfig
from kvjax.nn.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling
from kvjax.nn.routers import Groups, Router
from kvjax.nn.shared import Shared
from kvjax.nn.sharing import cla, last_layers, share, yoco
from kvjax.nn.tensor_product import (
    TensorProductAttention,
    TensorProductAttentionConfig,
    fixed_heads,
)
from kvjax.nn.tied import TiedAttention, TiedAttentionConfig

__all__ = [
    "Attention",
    "AttentionConfig",
    "ClampedSwiglu",
    "Decoder",
    "DecoderConfig",
    "Gated",
    "Groups",
    "LatentAttention",
    "LatentAttentionConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MlpConfig",
    "MoeConfig",
    "NormConfig",
    "Rope",
    "Router",
    "Shared",
    "TensorProductAttention",
    "TensorProductAttentionConfig",
    "TiedAttention",
    "TiedAttentionConfig",
    "YarnScaling",
    "cla",
    "fixed_heads",
    "last_layers",
    "share",
    "yoco",
]

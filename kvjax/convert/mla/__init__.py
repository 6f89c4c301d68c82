"""Conversion of MHA, GQA and MQA checkpoints to multi-head latent attention."""

from kvjax.convert.mla.convert import mla_ranks, to_mla
from kvjax.convert.mla.mha2mla import Mha2Mla
from kvjax.convert.mla.report import MlaReport
from kvjax.convert.mla.transmla import TransMla

__all__ = ["Mha2Mla", "MlaReport", "TransMla", "mla_ranks", "to_mla"]

"""Conversion of MHA, GQA and MQA checkpoints to multi-head latent attention."""

from kvjax.convert.mla.convert import mla_ranks, to_mla
from kvjax.convert.mla.mha2mla import Mha2Mla
from kvjax.convert.mla.report import MlaReport
from kvjax.convert.mla.transmla import TransMla

WAYS: dict[str, type[TransMla] | type[Mha2Mla]] = {way.name: way for way in (TransMla, Mha2Mla)}

__all__ = ["WAYS", "Mha2Mla", "MlaReport", "TransMla", "mla_ranks", "to_mla"]

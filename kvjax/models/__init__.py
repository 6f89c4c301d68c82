"""Checkpoints of published families: Hugging Face directories to decoders, and back."""

from kvjax.models.load import init, load, save
from kvjax.models.registry import FAMILIES

__all__ = ["FAMILIES", "init", "load", "save"]

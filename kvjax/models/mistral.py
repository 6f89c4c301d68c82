"""Mistral: Llama with an optional sliding window (read into the layers' specs)."""

from kvjax.models import llama
from kvjax.models.family import Family

FAMILY = Family("mistral", llama.decoder, llama.TENSORS)

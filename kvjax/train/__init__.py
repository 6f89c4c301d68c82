"""Uptraining: data, steps, checkpoints, evaluation."""

from kvjax.train.config import UptrainConfig
from kvjax.train.evaluate import held_out_loss
from kvjax.train.loop import data_mesh, train
from kvjax.train.metrics import ProgressBar
from kvjax.train.uptrain import UptrainReport, uptrain

__all__ = [
    "ProgressBar",
    "UptrainConfig",
    "UptrainReport",
    "data_mesh",
    "held_out_loss",
    "train",
    "uptrain",
]

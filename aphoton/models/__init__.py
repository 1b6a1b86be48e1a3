"""Architectures and checkpoints: `open_checkpoint`, `random_checkpoint` and the `Decoder` that runs them."""

from aphoton.models.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from aphoton.models.config import ModelConfig, RopeScaling
from aphoton.models.decoder import Decoder
from aphoton.models.hub import resolve
from aphoton.models.random import RandomCheckpoint, random_checkpoint
from aphoton.models.step import StepInput
from aphoton.progress import Progress

__all__ = [
    "Checkpoint",
    "Decoder",
    "ModelConfig",
    "Progress",
    "RandomCheckpoint",
    "RopeScaling",
    "StepInput",
    "find_checkpoint",
    "open_checkpoint",
    "random_checkpoint",
    "resolve",
]

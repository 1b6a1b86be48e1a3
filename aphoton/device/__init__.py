"""Where steps run, behind one small interface."""

from aphoton.device.base import PENDING, Batch, Device, Limits, Results

__all__ = ["PENDING", "Batch", "Device", "Limits", "Results"]

"""Compiled kernels: `NativeDecoder` (in `aphoton.kernels.native`) runs a whole forward in one call on the CPU."""

from aphoton.kernels.library import NativeUnavailable, native_available

__all__ = ["NativeUnavailable", "native_available"]

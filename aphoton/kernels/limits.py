"""What the kernels take at most, on every device. Importing it brings neither torch nor triton."""

__all__ = ["MOST_GROUP"]

MOST_GROUP = 64
"""Query heads that may share a KV head."""

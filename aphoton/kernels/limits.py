"""What is taken at most, on every device. Importing it brings neither torch nor triton."""

__all__ = ["MOST_GROUP", "MOST_SCORED"]

MOST_GROUP = 64
"""Query heads that may share a KV head."""

MOST_SCORED = 128
"""Tokens of a row whose logits are made at once, where those of all are asked for."""

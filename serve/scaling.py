"""`replicas_wanted`: Ray Serve's choice of how many replicas a model has.

Serve's controller imports this, so the package must be installed where the controller runs, on the head node.
"""

from typing import Any

__all__ = ["KV_USE", "replicas_wanted"]

KV_USE = "kv_use"
"""What a replica tells of itself: the share of its KV pages that sequences hold, 0 to 1."""
KV_TARGET = 0.8
"""Share of the pages that is aimed at: with all in use new requests wait, however many rows are free."""


def replicas_wanted(context: Any) -> tuple[float, dict[str, Any]]:
    """As many as the requests need, or as the pages that these hold, whichever are more.

    Serve applies the bounds, the delays, and the start from zero.

    :param context: Ray's ``AutoscalingContext``.
    """
    if context.current_num_replicas == 0:
        return context.target_num_replicas, {}
    by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    used = (context.aggregated_metrics or {}).get(KV_USE, {})
    by_pages = sum(used.values()) / KV_TARGET
    if context.total_num_requests == 0:
        by_pages = 0.0  # what is left of an average over requests that have ended
    return max(by_requests, by_pages), {}

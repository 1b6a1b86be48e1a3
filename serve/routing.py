"""`ConversationRouter`: Ray Serve's choice of a replica for a request."""

import random
from typing import Any

from ray.serve.request_router import LocalityMixin, MultiplexMixin, PendingRequest, RequestRouter

from aphoton_serve.affinity import Affinity, beginnings
from aphoton_serve.backend import Job

__all__ = ["ConversationRouter"]


class ConversationRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends a conversation to the replica that holds its beginning, unless that one is overloaded: a full replica, or
    one much busier than the idlest, costs more time than the cache saves. All else goes to the idler of two.

    Each handle has a router of its own, which knows what went through that handle.
    """

    def initialize_state(self, rows: int, slack: int) -> None:
        """Called by Serve.

        :param rows: requests that a replica runs at the same time; more wait there.
        :param slack: requests that the holder of a beginning may have more than the idlest replica.
        """
        self._rows = rows
        self._slack = slack
        self._affinity: Affinity[Any] = Affinity()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        """Groups of replicas, in the order in which to try them. Of a group Serve takes the idlest."""
        if not candidate_replicas:
            return []
        if pending_request is not None:
            # Else Serve tries again at once, and again, while all replicas are full.
            pending_request.routing_context.should_backoff = True
        idler = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        job = _job(pending_request)
        if job is None:
            return [idler]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        load = {id: self.replica_queue_len_cache.get(id) or 0 for id in by_id}
        least = min(load.values())
        holders = [
            by_id[id]
            for id in self._affinity.holders(beginnings(job), set(by_id))
            if load[id] < self._rows and load[id] <= least + self._slack
        ]
        return [holders, idler] if holders else [idler]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Called by Serve when a replica has taken a request."""
        job = _job(pending_request)
        if job is not None:
            self._affinity.note(beginnings(job), replica_id)


def _job(request: PendingRequest | None) -> Job | None:
    if request is None:
        return None
    return next((one for one in request.args if isinstance(one, Job)), None)

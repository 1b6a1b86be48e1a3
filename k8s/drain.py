"""Ends a Ray node without cutting an answer: what a worker's pod runs before it stops (``preStop``).

Serve hears that the node will go. It starts replicas elsewhere, sends new requests there, and stops those that are here
when their requests have ended. This returns when nothing of Serve is left here; the exit code is 1 when time ran out.

python drain.py SECONDS [NODE_ID]
"""

import subprocess
import sys
import time

import ray
from ray.util.state import list_actors

SERVES = ("ServeReplica:", "ProxyActor")
"""Classes of the actors that answers go through."""


def drain(seconds: int, node: str | None = None) -> bool:
    """Whether all had ended within so many seconds.

    :param node: this one, by default.
    """
    until = time.monotonic() + seconds
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    node = node or ray.get_runtime_context().get_node_id()
    command = ["ray", "drain-node", "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "its pod ends", "--deadline-remaining-seconds", str(seconds)]
    subprocess.run(command, check=True)
    while serving(node):
        if time.monotonic() > until:
            return False
        time.sleep(1)
    return True


def serving(node: str) -> bool:
    """Whether anything of Serve runs there."""
    actors = list_actors(filters=[("node_id", "=", node), ("state", "=", "ALIVE")], limit=10_000)
    return any(actor.class_name.startswith(SERVES) for actor in actors)


if __name__ == "__main__":
    sys.exit(not drain(int(sys.argv[1]), *sys.argv[2:]))

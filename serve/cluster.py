"""`local_cluster`: a Ray of one's own on this machine, for what is measured and tested."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["local_cluster"]

PUSHES = tuple(f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S" for who in ("REPLICA", "HANDLE"))
"""How often Serve's autoscaler is told of requests: ten seconds, unless these say otherwise."""


@contextmanager
def local_cluster(*, cpus: int = 8, push_interval: float | None = None) -> Iterator[str]:
    """Ray and Serve, with nothing deployed, until the context is left.

    :param cpus: that it believes to have: no more than so many actors of one CPU each.
    :param push_interval: seconds between two reports to Serve's autoscaler. None: Serve's own.
    :returns: the address of its HTTP proxy, on a free port.
    """
    import ray
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = {name: os.environ.get(name) for name in PUSHES}
    if push_interval is not None:
        os.environ.update(dict.fromkeys(PUSHES, f"{push_interval:g}"))  # Ray's processes inherit it
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""`local_cluster`: a Ray of one's own on this machine, for what is measured and tested."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["local_cluster"]


@contextmanager
def local_cluster(*, cpus: int = 8) -> Iterator[str]:
    """Ray and Serve, with nothing deployed, until the context is left.

    :param cpus: that it believes to have: no more than so many actors of one CPU each.
    :returns: the address of its HTTP proxy, on a free port.
    """
    import ray
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()

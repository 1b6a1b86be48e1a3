"""`take_streams`: the streams of a device, used again by the next one."""

import threading

import torch

__all__ = ["ALLOCATOR", "Streams", "return_streams", "take_streams"]

ALLOCATOR = threading.Lock()
"""Held while a graph is captured, and while free memory goes back to the driver, which torch refuses during a capture:
engines may be opened and closed by several threads."""

Streams = tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]
"""To compute, to send to the device, and to fetch from it."""

_free: dict[torch.device, list[Streams]] = {}


def take_streams(device: torch.device) -> Streams:
    """Streams that nobody else uses.

    cuBLAS keeps a workspace for every stream that it has ever worked on, 64 MiB on Hopper, until the program ends. So
    engines that come one after the other share their streams.
    """
    with ALLOCATOR:
        free = _free.setdefault(device, [])
        if free:
            return free.pop()
    return torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)


def return_streams(device: torch.device, streams: Streams) -> None:
    """Nothing is enqueued on them any more."""
    with ALLOCATOR:
        _free.setdefault(device, []).append(streams)

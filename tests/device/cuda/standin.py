"""A stand-in for CUDA: everything is done at once, on the CPU. It shows what is enqueued, not when it runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models.fused_rows import TorchPlanner

from aphoton.config import EngineConfig
from aphoton.device.source import Source
from aphoton.models import Decoder, RandomCheckpoint


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded, "an event that nobody has recorded is awaited"
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        assert self.recorded and other.recorded
        return 0.001


class Stream:
    """Which one is current is checked: work goes to the compute stream, copies to one of the others."""

    current: "Stream | None" = None

    def __init__(self, device: Any = None) -> None:
        self._before: list[Stream | None] = []

    def wait_event(self, event: Event) -> None:
        assert event.recorded, "a stream waits for what has not been enqueued"

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> "Stream":
        self._before.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._before.pop()


class Graph:
    """A captured step: it is enqueued again."""

    def __init__(self, enqueue: Callable[[], object], pool: Any) -> None:
        self.replay = torch.inference_mode()(enqueue)
        self.replay()


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *shape, pin_memory=False, **options: make(*shape, **options)


def _unwritten(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What is read before it is written shows."""

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        made = make(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() and not made.is_meta else made

    return empty


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone, what `CudaDevice` needs of CUDA."""
    from aphoton.device.cuda import graphs
    from aphoton.kernels.triton import decode_attention

    patch.setattr(decode_attention, "PROCESSORS", 2)  # so that attention has few programs to interpret
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    patch.setattr(graphs, "_capture", Graph)
    patch.setattr(torch, "zeros", _without_pinning(torch.zeros))
    patch.setattr(torch, "empty", _unwritten(_without_pinning(torch.empty)))


def open_standin(source: Source, config: EngineConfig, *, fused: bool = True) -> Any:
    """`open_cuda`, on the stand-in, in float32.

    :param fused: or else by the reference decoder.
    """
    from aphoton.device.cuda.device import CudaDevice
    from aphoton.models.fused import FusedDecoder

    device, dtype = torch.device("cpu"), torch.float32
    decoder = Decoder.load(source.config, source.weights, dtype=dtype, device=device, source=source.name)
    pages = source.pages(config, dtype, 1 << 30)
    kv = source.kv_cache(config, dtype, pages, device)
    planners: Any = (TorchPlanner(config.page_size), TorchPlanner(config.page_size))
    return CudaDevice(
        FusedDecoder(decoder, kv, positions=source.max_model_len, max_rows=config.max_rows) if fused else decoder,
        kv,
        source.limits(pages, dtype, "fused"),
        max_rows=config.max_rows,
        step_tokens=config.longest_step,
        planners=planners if fused else None,
        device=device,
    )


def tiny(checkpoint: RandomCheckpoint, max_model_len: int) -> Source:
    """A random model as a source."""
    return Source(
        config=checkpoint.config,
        weights=checkpoint.weights(),
        name="tiny",
        max_model_len=max_model_len,
        eos_token_ids=(),
    )


@contextlib.contextmanager
def every_yield_is_a_turn(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Launches are enqueued in as many turns of the loop as they can be; how many each took."""
    from aphoton.device.cuda import device

    patch.setattr(device, "HOLD", 0.0)
    turns: list[int] = []
    go_on = device.CudaDevice._go_on

    def counted(self: Any) -> None:
        turns.append(1)
        go_on(self)

    patch.setattr(device.CudaDevice, "_go_on", counted)
    yield turns

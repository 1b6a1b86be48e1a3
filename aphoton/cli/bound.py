"""`Bound`: how fast this machine could take a decode step at best, from what it was measured to read and to compute."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # it brings torch
    from aphoton.models import ModelConfig

__all__ = ["Bound", "Rates", "StepWork"]

REPEATS = 4
GIGA = 1e9


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine does, measured here and now: the best of several tries.

    :ivar read_gb_s: memory read, from sums over an array that no cache holds.
    :ivar gflop_s: multiply-adds (two operations each) of a matrix product, float32 on the CPU, bfloat16 on a GPU.
    """

    read_gb_s: float
    gflop_s: float

    @classmethod
    def measure(cls, device: str = "cpu") -> "Rates":
        """Takes less than a second, on all cores or on the GPU, there in bfloat16."""
        import torch

        if device == "cpu":
            array, side, dtype = torch.ones(64 << 20), 1536, torch.float32  # 256 MiB
        else:
            array, side, dtype = torch.ones(1 << 30, device=device), 8192, torch.bfloat16
        vector = torch.ones(8192, device=device)
        a, b, c = (torch.ones(side, side, dtype=dtype, device=device).normal_() for _ in range(3))
        wait = None if device == "cpu" else lambda: torch.cuda.synchronize(device)
        with torch.inference_mode():
            # Whichever reads faster: a sum, or the product of a matrix and a vector.
            reading = min(_best(lambda: array.sum(), wait), _best(lambda: torch.mv(array.view(-1, 8192), vector), wait))
            computing = _best(lambda: torch.mm(a, b, out=c), wait)
        return cls(read_gb_s=array.nbytes / reading / GIGA, gflop_s=2 * side**3 / computing / GIGA)

    def best(self, other: "Rates") -> "Rates":
        """The better of two measurements: on a machine with others on it, neither saw all of it."""
        return Rates(read_gb_s=max(self.read_gb_s, other.read_gb_s), gflop_s=max(self.gflop_s, other.gflop_s))


def _best(work: Callable[[], object], wait: Callable[[], None] | None) -> float:
    """Seconds, the least of several tries.

    :param wait: for the device, which works on after the call.
    """
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        if wait is not None:
            wait()
        times.append(time.perf_counter() - begin)
    return min(times)


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one decode step must do.

    :ivar weight_bytes: of the layers and the output head, read once whatever the rows.
    :ivar kv_bytes: keys and values of all rows' contexts.
    :ivar flops: of the matrix products and of attention.
    """

    weight_bytes: int
    kv_bytes: int
    flops: int

    @classmethod
    def of(cls, shape: "ModelConfig", *, rows: int, context: int, dtype: str) -> "StepWork":
        """:param context: tokens of each row, on average."""
        size = 4 if dtype == "float32" else 2
        hidden, head = shape.hidden_size, shape.head_dim
        attention = hidden * head * (2 * shape.num_heads + 2 * shape.num_kv_heads)
        matrices = shape.num_layers * (attention + 3 * hidden * shape.intermediate_size) + shape.vocab_size * hidden
        per_token = 2 * shape.num_layers * shape.num_kv_heads * head
        return cls(
            weight_bytes=matrices * size,
            kv_bytes=rows * context * per_token * size,
            flops=rows * (2 * matrices + 4 * context * shape.num_layers * shape.num_heads * head),
        )


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A decode step against the roofline: reading and computing at the measured rates, whichever takes longer.

    :ivar near: the bound over the step's time: 1 is as fast as can be. Above 1 the caches helped, or the rates were
        measured while others used the machine.
    """

    memory_ms: float
    compute_ms: float
    near: float

    @classmethod
    def of(cls, work: StepWork, rates: Rates, step_ms: float) -> "Bound":
        memory = (work.weight_bytes + work.kv_bytes) / (rates.read_gb_s * GIGA) * 1e3
        compute = work.flops / (rates.gflop_s * GIGA) * 1e3
        return cls(memory_ms=memory, compute_ms=compute, near=max(memory, compute) / step_ms)

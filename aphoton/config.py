"""`EngineConfig`: every setting of an engine, checked when it is made."""

import re
from typing import Literal, get_args

import msgspec

from aphoton.checks import check_choice, check_int, shown
from aphoton.errors import InvalidRequest

__all__ = ["DtypeName", "EngineConfig", "Kernels", "Overload"]

DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?|sim")
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Kernels = Literal["auto", "native", "fused", "torch"]
Overload = Literal["wait", "raise"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Every value is checked when the struct is made.

    :ivar device: where steps run: ``cpu``; ``cuda``, the first GPU that the program sees, or ``cuda:1``, the second;
        ``sim`` for a `SimModel`. ``auto`` is ``cuda`` on a machine with an NVIDIA GPU, else ``cpu``.
    :ivar dtype: of weights and KV. ``auto`` is what is fastest: bfloat16 on a GPU and with the native kernels, else
        float32.
    :ivar kernels: ``native``: compiled for this CPU (needs a C compiler on the machine); ``fused``: FlashInfer's and
        our own, on a GPU; ``torch``: the reference, on either; ``auto``: the fastest that is there for the model.
    :ivar pipeline_depth: steps in flight: 2 launches the next forward before the last one's tokens have reached
        the host, 1 waits for them (for comparison).
    :ivar max_rows: sequences that run at the same time.
    :ivar max_waiting: sequences that may wait for a row beyond those running; a request has one for each output. A
        request is let in when there is a place for its first output; the others follow as places come free.
    :ivar overload: what a call does when ``max_waiting`` sequences wait already: wait for a place, or raise
        `EngineOverloaded`.
    :ivar max_model_len: longest sequence, prompt and output, in tokens; at most the model's own limit, which None is.
    :ivar kv_pages: pages of KV cache. Give this, or ``kv_memory``, or neither (sized from ``max_rows``).
    :ivar kv_memory: bytes of KV cache.
    :ivar page_size: tokens in a page.
    :ivar max_step_tokens: tokens of a step while prompts are computed: one of each sequence that is past its prompt,
        and as much of prompts as has room, but half of it in any case; a longer prompt is computed in parts. Fewer make
        the pauses between tokens shorter while prompts arrive.
    :ivar prefix_cache: keep the KV of prompts and answers for those that begin alike, while there is room; of requests
        that say nothing else by ``use_prefix_cache``. The outputs of one request share their prompt's either way.
    :ivar seed: seeds the requests that bring none, each with a stream of its own. None: from the system.
    """

    device: str = "auto"
    dtype: DtypeName = "auto"
    kernels: Kernels = "auto"
    pipeline_depth: Literal[1, 2] = 2
    max_rows: int = 64
    max_waiting: int = 1024
    overload: Overload = "wait"
    max_model_len: int | None = None
    kv_pages: int | None = None
    kv_memory: int | None = None
    page_size: int = 16
    max_step_tokens: int = 2048
    prefix_cache: bool = True
    seed: int | None = None

    @property
    def longest_step(self) -> int:
        """Tokens that a step feeds at most."""
        return max(self.max_step_tokens, -(-self.max_step_tokens // 2) + self.max_rows)

    @property
    def gpu(self) -> int | None:
        """Which GPU is asked for; None when none is by name."""
        kind, _, index = self.device.partition(":")
        return int(index or 0) if kind == "cuda" else None

    def __post_init__(self) -> None:
        for name, kind in (
            ("dtype", DtypeName),
            ("kernels", Kernels),
            ("overload", Overload),
        ):
            check_choice(name, getattr(self, name), get_args(kind))
        if not (isinstance(self.device, str) and DEVICE.fullmatch(self.device)):
            raise InvalidRequest(
                "device", f"must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'sim', not {shown(self.device)}"
            )
        check_choice("pipeline_depth", self.pipeline_depth, (1, 2))
        check_int("max_rows", self.max_rows, 1, 4096)
        check_int("max_waiting", self.max_waiting, 0, 1_000_000)
        check_int("page_size", self.page_size, 1, 1024)
        check_int("max_step_tokens", self.max_step_tokens, 1)
        check_choice("prefix_cache", self.prefix_cache, (True, False))
        for name, most in (("max_model_len", 2**31 - 1), ("kv_pages", 2**31 - 2), ("kv_memory", 2**62)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, most)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        if self.kv_pages is not None and self.kv_memory is not None:
            raise InvalidRequest("kv_memory", "give kv_pages or kv_memory, not both")

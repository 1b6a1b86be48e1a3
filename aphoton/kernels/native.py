"""`NativeDecoder`: a decoder on the CPU whose whole forward is one call into compiled code."""

import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from ctypes import Structure, byref, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from aphoton.kernels.library import NativeUnavailable, load_library
from aphoton.kernels.limits import MOST_GROUP, MOST_SCORED
from aphoton.kernels.weights import DecoderWeights, LayerWeights
from aphoton.memory import system_zeros

__all__ = ["NativeDecoder"]

TYPES = {torch.float32: 0, torch.bfloat16: 1}
PROBLEMS = {
    2: "a token is not in the vocabulary",
    3: "a page table is too short, or names a page that the cache does not have",
    4: "starts and lengths do not fit the tokens, or reach beyond the positions that the decoder was made for",
}
NO_MEMORY = 1
MOST_HEAD_DIM = 512
ROTARY_AT_ONCE, ROTARY_AT_FIRST = 1 << 13, 1 << 18
"""Positions of the rotary table that are computed together, and how many are before the first step."""


class Step(Protocol):
    """What a forward reads, on the CPU: n rows that feed T tokens together.

    :ivar tokens: [T] int64
    :ivar starts, lengths: [n] int32
    :ivar tables: [n, P] int32
    """

    @property
    def tokens(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...
    @property
    def tables(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A step of `NativeDecoder`'s own."""

    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor


class Pages(Protocol):
    """The paged cache: ``data`` is [layers, 2, pages, page_size, kv_heads, head_dim]."""

    @property
    def data(self) -> Tensor: ...


def _fields(names: str, kind: type[c_int64 | c_double | c_void_p]) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Shape(Structure):
    _fields_ = [
        *_fields("layers hidden intermediate heads kv_heads head_dim vocab positions", c_int64),
        *_fields("type threads qkv_bias o_bias qk_norm", c_int64),
        *_fields("eps", c_double),
        *_fields("cos sin embed", c_void_p),
    ]


class _Layer(Structure):
    _fields_ = [
        *_fields("window", c_int64),
        *_fields("input_norm post_norm q_norm k_norm qkv_bias o_bias qkv o gate_up down", c_void_p),
    ]


class _Step(Structure):
    _fields_ = [
        *_fields("tokens starts lengths tables kv logits", c_void_p),
        *_fields("rows total table_width pages page_size", c_int64),
    ]


class NativeDecoder:
    """A model's weights, packed for the processor, and threads of its own that sleep between steps.

    Activations and sums are float32 whatever the weights are. A row's logits do not depend, in any bit, on the rows
    beside it, on how its tokens were cut into steps, or on the number of threads: a token has the same logits
    decoded alone, in a crowd, or prefilled again.

    :ivar threads: threads that share a step, the caller's included.
    """

    def __init__(self, weights: DecoderWeights, *, positions: int, threads: int | None = None) -> None:
        """Takes the weights over: each layer's memory, and that of a tied embedding, is free as soon as it is packed,
        if the caller holds no other reference to it.

        :param positions: tokens of the longest sequence: the rotary table has room for that many. What is beyond the
            longest contexts of today is filled when a step comes so far: a number that is damaged costs nothing.
        :param threads: None: as many as there are processors for this process, and not more than torch uses.
        :raises NativeUnavailable: for a model or a machine that the kernels cannot serve; nothing has been taken then.
        :raises MemoryError: when memory or threads are lacking; the same.
        :raises ValueError: for weights that have been handed over before.
        """
        _check(weights)
        library = load_library()
        config = weights.config
        self.threads = _usable_cpus() if threads is None else threads
        self._dtype = weights.dtype
        self._layout = (config.num_layers, config.num_kv_heads, config.head_dim)
        self._vocab_size = config.vocab_size
        self._lock = threading.Lock()
        # The library reads these for as long as the decoder lives. They are filled while the weights are handed over.
        self._embed = None if weights.lm_head is weights.embed else weights.embed
        try:
            self._cos, self._sin = (system_zeros((positions, config.head_dim // 2), torch.float32) for _ in range(2))
        except MemoryError as error:
            raise MemoryError(f"no memory for the rotary table of {positions} positions") from error

        shape = _Shape(
            layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            positions=positions,
            type=TYPES[weights.dtype],
            threads=self.threads,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm=config.qk_norm,
            eps=config.rms_norm_eps,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            embed=None if self._embed is None else _address(self._embed, weights.dtype),
        )
        library.aphoton_create.restype = c_void_p
        library.aphoton_forward.restype = c_int
        self._forward = library.aphoton_forward
        handle = library.aphoton_create(byref(shape))
        if not handle:
            raise MemoryError("no memory for the decoder's weights, or no threads")
        self._handle = c_void_p(handle)
        # Not at exit: a thread that has not ended by then may still be in a step.
        weakref.finalize(self, _destroy, library, self._handle, os.getpid()).atexit = False
        weights.hand_over(
            lambda index, layer: self._set_layer(library, index, layer, config.window(index)),
            lambda head: library.aphoton_set_head(self._handle, c_void_p(_address(head, weights.dtype))),
        )
        final_norm = weights.final_norm.float().contiguous()
        library.aphoton_set_final_norm(self._handle, c_void_p(final_norm.data_ptr()))
        self._rope = weights.rope
        self._rotary_filled = 0
        self._fill_rotary(ROTARY_AT_FIRST)

    def forward(self, step: Step, kv: Pages) -> Tensor:
        """Runs one step: writes its keys and values into ``kv`` and returns each row's next-token logits.

        Other threads run meanwhile: the interpreter's lock is released. Two forwards at once take turns.

        :param kv: of this model's layers, KV heads, head_dim and dtype.
        :returns: [n, V] float32, of each row's last token.
        :raises ValueError: for a step or a cache that does not fit this decoder; nothing has been written then.
        """
        data = kv.data
        layers, _, pages, page_size, kv_heads, head_dim = data.shape
        if (layers, kv_heads, head_dim) != self._layout:
            raise ValueError(f"a KV cache of {tuple(data.shape)} is not one of this model")
        rows, width = step.tables.shape
        if not len(step.starts) == len(step.lengths) == rows:
            raise ValueError("starts, lengths and tables are of different rows")
        logits = torch.empty(rows, self._vocab_size, dtype=torch.float32, device="cpu")
        arguments = _Step(
            tokens=_address(step.tokens, torch.int64),
            starts=_address(step.starts, torch.int32),
            lengths=_address(step.lengths, torch.int32),
            tables=_address(step.tables, torch.int32),
            kv=_address(data, self._dtype),
            logits=logits.data_ptr(),
            rows=rows,
            total=len(step.tokens),
            table_width=width,
            pages=pages,
            page_size=page_size,
        )
        with self._lock:
            if self._rotary_filled < len(self._cos) and rows:
                self._fill_rotary(int((step.starts + step.lengths).max()))
            problem = self._forward(self._handle, byref(arguments))
        if problem == NO_MEMORY:
            raise MemoryError(f"no memory for the buffers of a step of {len(step.tokens)} tokens")
        if problem:
            raise ValueError(PROBLEMS[problem])
        return logits

    def forward_scored(
        self, step: Step, kv: Pages, scored: Mapping[int, int], take: Callable[[int, Tensor], None]
    ) -> Tensor:
        """`forward`, and logits behind more tokens than each row's last.

        The tokens that are asked for go first, each as a row of its own with the pages of its row: all of a step's keys
        and values are written before any of its queries looks at them, and how tokens are cut into rows changes no bit.

        :param scored: by row's index in the step, how many of its first tokens.
        :param take: called with the index and the [c, V] float32 logits of its next c tokens.
        """
        starts, lengths = step.starts.clone(), step.lengths.clone()
        begins = lengths.cumsum(0) - lengths
        left = torch.ones(len(step.tokens), dtype=torch.bool)
        for index, count in scored.items():
            begin, start = int(begins[index]), int(starts[index])
            for at in range(0, count, MOST_SCORED):
                end = min(at + MOST_SCORED, count)
                part = _Part(
                    tokens=step.tokens[begin + at : begin + end],
                    starts=torch.arange(start + at, start + end, dtype=torch.int32),
                    lengths=torch.ones(end - at, dtype=torch.int32),
                    tables=step.tables[index].expand(end - at, -1).contiguous(),
                )
                take(index, self.forward(part, kv))
            # A row's last token stays, for its logits: fed once more, it leaves the same keys and values.
            done = min(count, int(lengths[index]) - 1)
            left[begin : begin + done] = False
            starts[index] += done
            lengths[index] -= done
        return self.forward(_Part(tokens=step.tokens[left], starts=starts, lengths=lengths, tables=step.tables), kv)

    def _fill_rotary(self, end: int) -> None:
        """Fills the table up to position ``end``, or its own end, and no more than a part beyond."""
        while (begin := self._rotary_filled) < min(end, len(self._cos)):
            part = slice(begin, min(begin + ROTARY_AT_ONCE, len(self._cos)))
            self._cos[part], self._sin[part] = self._rope.cos_sin(torch.arange(part.start, part.stop))
            self._rotary_filled = part.stop

    def _set_layer(self, library: ctypes.CDLL, index: int, layer: LayerWeights, window: int | None) -> None:
        vectors = {
            name: None if vector is None else vector.float().contiguous()
            for name, vector in (
                ("input_norm", layer.input_norm),
                ("post_norm", layer.post_norm),
                ("q_norm", layer.q_norm),
                ("k_norm", layer.k_norm),
                ("qkv_bias", layer.qkv_bias),
                ("o_bias", layer.o_bias),
            )
        }
        matrices = {
            name: matrix.contiguous()
            for name, matrix in (
                ("qkv", layer.qkv),
                ("o", layer.o),
                ("gate_up", layer.gate_up),
                ("down", layer.down),
            )
        }
        held = vectors | matrices
        pointers = {name: None if tensor is None else tensor.data_ptr() for name, tensor in held.items()}
        library.aphoton_set_layer(self._handle, c_int64(index), byref(_Layer(window=window or 0, **pointers)))


def _destroy(library: ctypes.CDLL, handle: c_void_p, process: int) -> None:
    # A forked child has the memory, but not the threads that would be waited for.
    if os.getpid() == process:
        library.aphoton_destroy(handle)


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        given = f"{tensor.dtype} of strides {tensor.stride()} on {tensor.device}"
        raise ValueError(f"expected contiguous {dtype} on the CPU, not {given}")
    return tensor.data_ptr()


def _check(weights: DecoderWeights) -> None:
    """:raises NativeUnavailable: for a model that the kernels cannot run.
    :raises ValueError: for weights that are not there any more: the kernels would read beyond their end.
    """
    config = weights.config
    if weights.lm_head.shape != (config.vocab_size, config.hidden_size):
        raise ValueError("the weights have been handed over before")
    if weights.dtype not in TYPES:
        raise NativeUnavailable(f"the native kernels compute float32 and bfloat16, not {weights.dtype}")
    if weights.embed.device.type != "cpu":
        raise NativeUnavailable(f"the native kernels run on the CPU, and the weights are on {weights.embed.device}")
    if config.head_dim % 2 or config.head_dim > MOST_HEAD_DIM:
        raise NativeUnavailable(
            f"the native kernels need an even head_dim up to {MOST_HEAD_DIM}, not {config.head_dim}"
        )
    if config.num_heads % config.num_kv_heads or config.num_heads // config.num_kv_heads > MOST_GROUP:
        raise NativeUnavailable(
            f"the native kernels need up to {MOST_GROUP} query heads for each KV head, "
            f"not {config.num_heads} for {config.num_kv_heads}"
        )


def _usable_cpus() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, torch.get_num_threads(), _quota()))


def _quota() -> int:
    """Processors that the container may use (control groups version 2), rounded up; many where nothing limits them."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return 1 << 16

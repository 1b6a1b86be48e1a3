"""Rows on a `FusedDecoder`, fed as the device feeds them, and a planner that needs no FlashInfer."""

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from aphoton.attention import KVCache
from aphoton.models import Decoder

__all__ = ["FusedRows", "Planner", "TorchPlanner"]


class Planner(Protocol):
    """What of `aphoton.attention.flashinfer.PrefillPlanner` is used."""

    def plan(self, starts: NDArray[np.int32], lengths: NDArray[np.int32], pages: Tensor) -> None: ...
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None, out: Tensor) -> None: ...


class TorchPlanner:
    """The same as `PrefillPlanner` in plain torch, row by row."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._rows: list[tuple[int, int, Tensor]] = []

    def plan(self, starts: NDArray[np.int32], lengths: NDArray[np.int32], pages: Tensor) -> None:
        counts = (-(-(starts + lengths) // self._page_size)).tolist()
        assert len(pages) == sum(counts), "each row's pages, and no more"
        self._rows = list(zip(starts.tolist(), lengths.tolist(), pages.long().split(counts), strict=True))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None, out: Tensor) -> None:
        parts = q.split([length for _, length, _ in self._rows])
        for (start, length, pages), part, target in zip(
            self._rows, parts, out.split([len(part) for part in parts]), strict=True
        ):
            end = start + length
            key, value = (cache[pages].flatten(0, 1)[:end].transpose(0, 1) for cache in (keys, values))
            position, other = torch.arange(start, end, device=q.device)[:, None], torch.arange(end, device=q.device)
            seen = other <= position
            if window is not None:
                seen &= other > position - window
            attended = F.scaled_dot_product_attention(part.transpose(0, 1), key, value, attn_mask=seen, enable_gqa=True)
            target.copy_(attended.transpose(0, 1))


def finished(step: Generator[None, None, Tensor]) -> Tensor:
    """What the step returns, enqueued at once."""
    while True:
        try:
            next(step)
        except StopIteration as end:
            logits: Tensor = end.value
            return logits


class FusedRows:
    """Rows 1 to ``rows``. Their pages are shuffled.

    :ivar lengths: tokens of each row that are in the cache; row 0 is padding.
    """

    def __init__(
        self,
        decoder: Decoder,
        planner: Planner,
        *,
        rows: int,
        positions: int,
        page_size: int,
        padding: int = 0,
        unwritten: float = 0.0,
    ) -> None:
        """:param positions: tokens of the longest row.
        :param padding: rows of padding that a decode step takes along at most.
        :param unwritten: what is in the rows' pages at first.
        """
        # Not at the top: it needs triton, and its kernels are made for the GPU or for the interpreter when it comes.
        from aphoton.models.fused import FusedDecoder, RowState

        config, device = decoder.config, decoder.device
        columns = -(-positions // page_size)
        kv = KVCache(
            layers=config.num_layers,
            pages=rows * columns + 1,
            page_size=page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            device=device,
        )
        kv.data[:, :, 1:] = unwritten
        tables = np.zeros((rows + 1, columns), np.int32)
        tables[1:] = np.random.default_rng(0).permutation(rows * columns).reshape(rows, columns) + 1
        self._tables = tables
        self._page_size = page_size
        self._planner = planner
        self._fused = FusedDecoder(decoder, kv, positions=positions, max_rows=rows + padding)
        self._device, self._dtype, self._vocab_size = device, decoder.dtype, config.vocab_size
        self._state = RowState(
            last=torch.zeros(rows + 1, dtype=torch.int32, device=device), tables=self._tensor(tables)
        )
        self.lengths = np.zeros(rows + 1, np.int32)

    def set_last(self, tokens: Mapping[int, int]) -> None:
        """Say which token each row has sampled last."""
        self._state.last[self._tensor(np.array(list(tokens))).long()] = self._tensor(np.array(list(tokens.values())))

    @torch.inference_mode()
    def mixed(
        self, fed: Mapping[int, Sequence[int] | None], scored: Mapping[int, list[Tensor]] | None = None
    ) -> Tensor:
        """A step that feeds these tokens, or a row's last token for None. Returns [n, V] float32 on the host.

        :param scored: by row, a list to which the logits behind all of its tokens go.
        """
        from aphoton.models.fused import MixedInput

        rows = np.array(list(fed), np.int32)
        new = [[-1] if tokens is None else list(tokens) for tokens in fed.values()]
        starts, lengths = self.lengths[rows], np.array([len(tokens) for tokens in new], np.int32)
        positions = [start + index for start, tokens in zip(starts, new, strict=True) for index in range(len(tokens))]
        step = MixedInput(
            tokens=self._tensor(np.concatenate(new)),
            positions=self._tensor(np.array(positions)),
            rows=self._tensor(rows.repeat(lengths)),
            ends=self._tensor(lengths.cumsum() - 1),
        )
        counts = -(-(starts + lengths) // self._page_size)
        pages = [self._tables[row, :count] for row, count in zip(rows, counts, strict=True)]
        self._planner.plan(starts, lengths, self._tensor(np.concatenate(pages)))
        ends = dict(zip(rows.tolist(), lengths.cumsum().tolist(), strict=True))
        asked = [
            (ends[row] - len(fed[row] or ()), ends[row], lambda logits, taken=taken: taken.append(logits.float().cpu()))
            for row, taken in (scored or {}).items()
        ]
        logits = finished(self._fused.mixed(step, self._state, self._planner, scored=asked))  # type: ignore[arg-type]
        self.lengths[rows] += lengths
        return logits.float().cpu()

    @torch.inference_mode()
    def decode(self, rows: Sequence[int], *, padding: int = 0) -> Tensor:
        """A step that feeds each row's last token. Returns [n, V] float32 on the host, without the padding."""
        taken = np.array([*rows, *[0] * padding], np.int32)
        logits = torch.empty(len(taken), self._vocab_size, dtype=self._dtype, device=self._device)
        self._fused.decode(self._tensor(taken), self._tensor(self.lengths[taken]), self._state, logits)
        self.lengths[list(rows)] += 1
        return logits[: len(rows)].float().cpu()

    def _tensor(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self._device)

"""`PrefillPlanner`: FlashInfer's paged attention for steps that feed whole prompts."""

from collections.abc import Sequence

import flashinfer
import numpy as np
import torch
from flashinfer.utils import device_support_pdl
from numpy.typing import NDArray
from torch import Tensor

from aphoton.attention.prebuild import FOLDER
from aphoton.kernels.prebuilt import prebuilt_folder

__all__ = ["PrefillPlanner"]

WORKSPACE = 128 << 20
"""Bytes of partial results, for rows that are split over several thread blocks: what FlashInfer's manual recommends."""


class PrefillPlanner:
    """Plans the attention of one step at a time, and runs it layer by layer.

    One per slot. Hazard: planning fills pinned memory of FlashInfer's own, which the device reads later, so the next
    plan must wait until this one's step has been committed.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None],
    ) -> None:
        """:param windows: the sliding windows that layers have, in tokens: a plan is made for each."""
        if (prebuilt := prebuilt_folder()) is not None:
            # Where FlashInfer looks first, and what it finds there it takes as it is: nothing is compared or written.
            flashinfer.jit.env.FLASHINFER_AOT_DIR = prebuilt / FOLDER
        self._shape = (heads, kv_heads, head_dim, page_size)
        self._dtype = dtype
        workspace = torch.empty(_workspace(heads, kv_heads, head_dim, device), dtype=torch.uint8, device=device)
        # Layers run one after the other, so that all windows may share the workspace.
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            for window in dict.fromkeys(windows)
        }
        self._page_size = page_size
        self._overlaps = device_support_pdl(device)  # asked once: it takes as long as a launch

    def plan(self, starts: NDArray[np.int32], lengths: NDArray[np.int32], pages: Tensor) -> None:
        """Prepare a step, once for all layers. The rows' new keys and values must be in the pages before `attend`.

        :param starts: [n] on the host, tokens of each row that were there before this step.
        :param lengths: [n] on the host, tokens that each row feeds.
        :param pages: int32 on the device, the page ids of the rows' tokens, row by row.
        """
        ends = starts + lengths
        counts = -(-ends // self._page_size)
        last = (ends - 1) % self._page_size + 1
        heads, kv_heads, head_dim, page_size = self._shape
        queries, keys, last_lengths = _indptr(lengths), _indptr(counts), torch.from_numpy(last.astype(np.int32))
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                queries,
                keys,
                pages,
                last_lengths,
                heads,
                kv_heads,
                head_dim,
                page_size,
                causal=True,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                non_blocking=True,
            )

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None, out: Tensor) -> None:
        """Attend over one layer.

        :param q: [T, heads, head_dim], rotated.
        :param keys: [pages, page_size, kv_heads, head_dim], ``values`` likewise.
        :param out: [T, heads, head_dim]
        """
        self._wrappers[window].run(q, (keys, values), out=out, enable_pdl=self._overlaps)


def _indptr(lengths: NDArray[np.int32]) -> Tensor:
    """[n + 1] where each row begins, and the end."""
    begins = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=begins[1:])
    return torch.from_numpy(begins)


def _workspace(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> int:
    """Bytes that the largest plan needs: two blocks of queries for each multiprocessor, a float32 sum for each query.

    The recommended size is too small for many query heads that share few KV heads.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    queries = 64 if head_dim >= 256 else 128
    return max(WORKSPACE, heads * max(2 * processors // kv_heads, 1) * queries * (head_dim + 1) * 4 + 4096)

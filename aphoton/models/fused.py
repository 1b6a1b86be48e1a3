"""`FusedDecoder`: the forward pass of `Decoder` on CUDA, in fewer and fused kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aphoton.attention.cache import KVCache
from aphoton.kernels.triton.activation import silu_mul
from aphoton.kernels.triton.decode_attention import DecodeAttention
from aphoton.kernels.triton.embed import embed
from aphoton.kernels.triton.norm import add_rms_norm, rms_norm
from aphoton.kernels.triton.rope_append import rope_append
from aphoton.models.decoder import Decoder

if TYPE_CHECKING:  # it brings FlashInfer, which the decode steps do without
    from aphoton.attention.flashinfer import PrefillPlanner

__all__ = ["FusedDecoder", "MixedInput", "RowState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What the rows keep on the device from step to step. Row 0 is padding.

    :ivar last: [rows] int32, the last sampled token.
    :ivar tables: [rows, pages] int32, page ids.
    """

    last: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedInput:
    """n rows that feed T tokens together, prompts and single tokens, as int32 tensors on the device.

    :ivar tokens: [T], or less than 0 for a row's last sampled token.
    :ivar positions: [T] of each token in its row.
    :ivar rows: [T] of each token.
    :ivar ends: [n] index of each row's last token.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    ends: Tensor


class FusedDecoder:
    """A model's weights on a GPU, and steps over them. Nothing here waits for the device.

    Decode steps take everything that changes from step to step out of device memory, so that they can be captured in
    a CUDA graph; steps with prompts in them need a plan from the host.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, *, positions: int, max_rows: int) -> None:
        """:param positions: tokens of the longest sequence: the rotary table is made for that many.

        :raises ValueError: for a model that the kernels cannot run.
        """
        config = decoder.config
        self._decoder = decoder
        self._config = config
        self._caches = [(layer[0], layer[1]) for layer in kv.data]
        cos, sin = decoder.rope.cos_sin(torch.arange(positions, device=decoder.device))
        self._rotation = torch.cat((cos, sin), dim=1).contiguous()
        self._attention = DecodeAttention(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=kv.page_size,
            dtype=decoder.dtype,
            device=decoder.device,
            max_batch=max_rows,
        )

    def decode(self, rows: Tensor, starts: Tensor, state: RowState) -> Tensor:
        """One token of each row: its last one.

        :param rows: [n] int32, which rows; 0 for padding.
        :param starts: [n] int32, tokens of the row that are in the cache.
        :returns: [n, V] logits.
        """
        config = self._config
        x = self._empty(len(rows), config.hidden_size)
        embed(rows, state.last, self._decoder.embed, x)

        def attend(index: int, qkv: Tensor, out: Tensor) -> None:
            layer, (keys, values) = self._decoder.layers[index], self._caches[index]
            self._attention.attend(
                qkv,
                keys,
                values,
                state.tables,
                rows,
                starts,
                self._rotation,
                out,
                window=config.window(index) or 0,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=config.rms_norm_eps,
            )

        return self._run(x, attend, None)

    def mixed(self, step: MixedInput, state: RowState, planner: "PrefillPlanner") -> Tensor:
        """Prompts and single tokens together.

        :param planner: with this step planned.
        :returns: [n, V] logits of each row's last token.
        """
        config = self._config
        tokens = torch.where(step.tokens < 0, state.last[step.rows], step.tokens)
        x = torch.nn.functional.embedding(tokens, self._decoder.embed)
        q = self._empty(len(x), config.num_heads, config.head_dim)

        def attend(index: int, qkv: Tensor, out: Tensor) -> None:
            layer, (keys, values) = self._decoder.layers[index], self._caches[index]
            rope_append(
                qkv,
                q,
                keys,
                values,
                state.tables,
                step.rows,
                step.positions,
                self._rotation,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=config.rms_norm_eps,
            )
            planner.attend(q, keys, values, config.window(index), out.view_as(q))

        return self._run(x, attend, step.ends)

    def _run(self, x: Tensor, attend: Callable[[int, Tensor, Tensor], None], ends: Tensor | None) -> Tensor:
        """The layers over [T, H] embeddings ``x``, which is overwritten: it holds the sum of all layers so far."""
        config, decoder = self._config, self._decoder
        eps = config.rms_norm_eps
        normed = torch.empty_like(x)
        attended = self._empty(len(x), config.num_heads * config.head_dim)
        gated = self._empty(len(x), config.intermediate_size)
        rms_norm(x, decoder.layers[0].input_norm, eps, normed)
        for index, layer in enumerate(decoder.layers):
            attend(index, torch.nn.functional.linear(normed, layer.qkv, layer.qkv_bias), attended)
            added = torch.nn.functional.linear(attended, layer.o, layer.o_bias)
            add_rms_norm(added, x, layer.post_norm, eps, normed)
            silu_mul(torch.nn.functional.linear(normed, layer.gate_up), gated)
            added = torch.nn.functional.linear(gated, layer.down)
            if index + 1 < len(decoder.layers):
                add_rms_norm(added, x, decoder.layers[index + 1].input_norm, eps, normed)
        if ends is not None:
            added, x = added[ends], x[ends]
            normed = torch.empty_like(x)
        add_rms_norm(added, x, decoder.final_norm, eps, normed)
        return torch.nn.functional.linear(normed, decoder.lm_head)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._decoder.dtype, device=self._decoder.device)

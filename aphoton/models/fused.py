"""`FusedDecoder`: the forward pass of `Decoder` on CUDA, in fewer and fused kernels."""

from collections.abc import Callable, Generator, Sequence
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

__all__ = ["Activations", "FusedDecoder", "MixedInput", "RowState"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What the pieces of a mixed step leave to each other and to attention, in the model's dtype.

    :ivar x: [T, H] the sum of all layers so far, but for ``added``.
    :ivar q: [T, heads, D] rotated queries.
    :ivar attended: [T, heads * D]
    :ivar added: [T, H] of the last layer.
    """

    x: Tensor
    q: Tensor
    attended: Tensor
    added: Tensor

    def first(self, tokens: int) -> "Activations":
        """Those of the first so many tokens."""
        return Activations(
            x=self.x[:tokens], q=self.q[:tokens], attended=self.attended[:tokens], added=self.added[:tokens]
        )

    def clear(self) -> None:
        """Fill them with zeros."""
        for tensor in (self.x, self.q, self.attended, self.added):
            tensor.zero_()


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
        # As many as there may be rows: no more memory than log-probabilities of all rows take.
        self._scored_tokens = max(16, max_rows)
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

    def decode(self, rows: Tensor, starts: Tensor, state: RowState, out: Tensor) -> None:
        """One token of each row: its last one.

        :param rows: [n] int32, which rows; 0 for padding.
        :param starts: [n] int32, tokens of the row that are in the cache.
        :param out: [n, V] logits.
        """
        config, decoder = self._config, self._decoder
        eps = config.rms_norm_eps
        x = self._empty(len(rows), config.hidden_size)  # the sum of all layers so far
        normed = torch.empty_like(x)
        attended = self._empty(len(x), config.num_heads * config.head_dim)
        gated = self._empty(len(x), config.intermediate_size)
        embed(rows, state.last, decoder.embed, x)
        rms_norm(x, decoder.layers[0].input_norm, eps, normed)
        norms = [layer.input_norm for layer in decoder.layers[1:]] + [decoder.final_norm]
        for index, (layer, (keys, values), norm) in enumerate(zip(decoder.layers, self._caches, norms, strict=True)):
            self._attention.attend(
                torch.nn.functional.linear(normed, layer.qkv, layer.qkv_bias),
                keys,
                values,
                state.tables,
                rows,
                starts,
                self._rotation,
                attended,
                window=config.window(index) or 0,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
            )
            added = torch.nn.functional.linear(attended, layer.o, layer.o_bias)
            add_rms_norm(added, x, layer.post_norm, eps, normed)
            silu_mul(torch.nn.functional.linear(normed, layer.gate_up), gated)
            add_rms_norm(torch.nn.functional.linear(gated, layer.down), x, norm, eps, normed)
        torch.mm(normed, decoder.lm_head.t(), out=out)

    def mixed(
        self,
        step: MixedInput,
        state: RowState,
        planner: "PrefillPlanner",
        activations: Activations | None = None,
        run: Callable[[int], None] | None = None,
        scored: Sequence[tuple[int, int, Callable[[Tensor], None]]] = (),
    ) -> Generator[None, None, Tensor]:
        """Prompts and single tokens together: `piece`, attention, `piece`, and so on.

        A generator, which yields behind each layer: enqueueing takes the host milliseconds, and others wait for it.

        :param planner: with this step planned.
        :param activations: for as many tokens as the step has, or more. None: made here.
        :param run: runs a piece on them, which has been captured. None: it is enqueued here.
        :param scored: (begin, end, take): ``take`` is called with the [c, V] logits of the next c of these tokens.
        :returns: [n, V] logits of each row's last token.
        """
        config = self._config
        count = len(step.tokens)
        acts = self.activations(count) if activations is None else activations
        attended = acts.attended.view_as(acts.q)[:count]
        for index, (keys, values) in enumerate(self._caches):
            if run is None:
                self.piece(index, step, state, acts)
            else:
                run(index)
            planner.attend(acts.q[:count], keys, values, config.window(index), attended)
            yield
        if run is None:
            self.piece(self.pieces - 1, step, state, acts)
        else:
            run(self.pieces - 1)
        for begin, end, take in scored:
            for at in range(begin, end, self.scored_tokens):
                part = slice(at, min(at + self.scored_tokens, end))
                take(self._logits(acts.added[part], acts.x[part].clone()))
                yield
        return self._logits(acts.added[step.ends], acts.x[step.ends])

    def _logits(self, added: Tensor, x: Tensor) -> Tensor:
        """[c, V] of [c, H] behind the last layer. ``x`` is overwritten."""
        normed = torch.empty_like(x)
        add_rms_norm(added, x, self._decoder.final_norm, self._config.rms_norm_eps, normed)
        return torch.nn.functional.linear(normed, self._decoder.lm_head)

    @property
    def scored_tokens(self) -> int:
        """Tokens whose logits are made at once, where those of all are asked for."""
        return self._scored_tokens

    @property
    def pieces(self) -> int:
        """Of a mixed step."""
        return self._config.num_layers + 1

    def activations(self, tokens: int) -> Activations:
        """For mixed steps of so many tokens."""
        config = self._config
        return Activations(
            x=self._empty(tokens, config.hidden_size),
            q=self._empty(tokens, config.num_heads, config.head_dim),
            attended=self._empty(tokens, config.num_heads * config.head_dim),
            added=self._empty(tokens, config.hidden_size),
        )

    def piece(self, index: int, step: MixedInput, state: RowState, acts: Activations) -> None:
        """What is between two attentions: from behind that of layer ``index - 1`` up to that of layer ``index``.

        Everything that changes from step to step is in device memory, so that it can be captured in a CUDA graph.
        """
        config, decoder = self._config, self._decoder
        eps = config.rms_norm_eps
        normed = torch.empty_like(acts.x)
        if index == 0:
            tokens = torch.where(step.tokens < 0, state.last[step.rows], step.tokens)
            torch.index_select(decoder.embed, 0, tokens, out=acts.x)
            rms_norm(acts.x, decoder.layers[0].input_norm, eps, normed)
        else:
            layer = decoder.layers[index - 1]
            added = torch.nn.functional.linear(acts.attended, layer.o, layer.o_bias)
            add_rms_norm(added, acts.x, layer.post_norm, eps, normed)
            gated = self._empty(len(acts.x), config.intermediate_size)
            silu_mul(torch.nn.functional.linear(normed, layer.gate_up), gated)
            torch.mm(gated, layer.down.t(), out=acts.added)
            if index == config.num_layers:
                return
            add_rms_norm(acts.added, acts.x, decoder.layers[index].input_norm, eps, normed)
        layer, (keys, values) = decoder.layers[index], self._caches[index]
        rope_append(
            torch.nn.functional.linear(normed, layer.qkv, layer.qkv_bias),
            acts.q,
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
            eps=eps,
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._decoder.dtype, device=self._decoder.device)

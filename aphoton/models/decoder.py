"""`Decoder`: the forward pass of Llama, Qwen2, Qwen3 and Mistral in torch."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from aphoton.attention.cache import KVCache
from aphoton.attention.torch import TorchAttention
from aphoton.errors import ModelError
from aphoton.kernels.limits import MOST_SCORED
from aphoton.memory import system_zeros
from aphoton.models.config import ModelConfig
from aphoton.models.rope import Rope
from aphoton.models.step import StepInput

__all__ = ["ROPE_FACTORS", "Decoder", "DecoderLayer", "check_tensors", "tensor_shapes"]

OWN_PAGES = 1 << 15
"""Values from which a weight is worth pages of its own."""

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the one tensor that Hugging Face's checkpoints do not have: a GGUF file's divisors of `Rope.inv_freq`."""


LAYER = "model.layers."
"""What the names of a layer's tensors begin with, before its index."""

HEAD = -1
"""The head's place among the layers' indices."""


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer. Matrices are [out, in]; H hidden, D head_dim, I intermediate.

    :ivar qkv: [(heads + 2 * kv_heads) * D, H] queries, keys, values one below the other.
    :ivar q_norm, k_norm: [D] over each head, before rotation.
    :ivar o: [H, heads * D]
    :ivar gate_up: [2 * I, H] gate over up.
    :ivar down: [H, I]
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, of memory that goes back to the system with the tensor if it is large."""
    if device.type != "cpu" or math.prod(shape) < OWN_PAGES:
        return torch.empty(shape, dtype=dtype, device=device)
    return system_zeros(shape, dtype)


class Decoder:
    """A model on one device. Call `forward` under ``torch.inference_mode``.

    :ivar embed: [V, H]
    :ivar lm_head: [V, H], the same tensor as ``embed`` when the model ties them.
    :ivar final_norm: [H]
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        """Allocates; the weights' values mean nothing until they have been filled: see `load` and `open`."""

        def empty(*shape: int) -> Tensor:
            return _empty(shape, dtype, torch.device(device))

        hidden, head = config.hidden_size, config.head_dim
        queries, qkv = config.num_heads * head, (config.num_heads + 2 * config.num_kv_heads) * head
        self._unread: Iterable[tuple[str, Tensor]] | None = None
        self._source = ""
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.rope = Rope(config, device=device)
        self.embed = empty(config.vocab_size, hidden)
        self.layers = [
            DecoderLayer(
                input_norm=empty(hidden),
                qkv=empty(qkv, hidden),
                qkv_bias=empty(qkv) if config.qkv_bias else None,
                q_norm=empty(head) if config.qk_norm else None,
                k_norm=empty(head) if config.qk_norm else None,
                o=empty(hidden, queries),
                o_bias=empty(hidden) if config.o_bias else None,
                post_norm=empty(hidden),
                gate_up=empty(2 * config.intermediate_size, hidden),
                down=empty(hidden, config.intermediate_size),
            )
            for _ in range(config.num_layers)
        ]
        self.final_norm = empty(hidden)
        self.lm_head = self.embed if config.tie_embeddings else empty(config.vocab_size, hidden)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        source: str = "checkpoint",
    ) -> "Decoder":
        """A decoder with ``weights``, cast to ``dtype``. One source tensor is held at a time.

        :param weights: tensors under Hugging Face's names, in any order, and perhaps `ROPE_FACTORS`.
        :param source: what to call the checkpoint in an error.
        :raises ModelError: for a tensor that is missing, unknown, or of another shape than ``config`` says.
        """
        decoder = cls.open(config, weights, dtype=dtype, device=device, source=source)
        decoder.read()
        return decoder

    @classmethod
    def open(
        cls,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        source: str = "checkpoint",
    ) -> "Decoder":
        """The same, with ``weights`` still to be read, by `read` or `hand_over`: it takes hardly any memory before."""
        decoder = cls(config, dtype=dtype, device=device)
        decoder._unread, decoder._source = weights, source
        return decoder

    def read(self) -> None:
        """Reads the weights, if that has not been done yet.

        :raises ModelError: as `load` does.
        """
        for _ in self._parts():
            pass

    def hand_over(self, take_layer: Callable[[int, DecoderLayer], None], take_head: Callable[[Tensor], None]) -> None:
        """Gives the weights away, each layer and the head as soon as it has been read: nothing need be there twice, and
        the decoder holds neither afterwards, nor a tied embedding. What it is to keep is for the taker to copy.

        :param take_layer: called with each layer's index and weights.
        :param take_head: called with `lm_head`.
        :raises ModelError: as `load` does. By then some have been given away.
        """
        parts, layers = self._parts(), dict(enumerate(self.layers))
        self.layers = []
        for part in parts:
            if part == HEAD:
                take_head(self.lm_head)
                self.lm_head = self.lm_head.new_empty(0, self.config.hidden_size)
                if self.config.tie_embeddings:
                    self.embed = self.lm_head
            else:
                take_layer(part, layers.pop(part))

    def _parts(self) -> Iterator[int]:
        """Reads what has not been read, and yields the index of each layer, and `HEAD`, when all of it is there."""
        unread, self._unread = self._unread, None
        if unread is None:
            return iter((*range(len(self.layers)), HEAD))
        return self._reading(unread, self._places())

    def _reading(self, unread: Iterable[tuple[str, Tensor]], places: dict[str, Tensor]) -> Iterator[int]:
        found: dict[str, tuple[int, ...]] = {}
        missing = Counter(map(self._part, places))
        for name, tensor in unread:
            found[name] = tuple(tensor.shape)
            place = places.pop(name, None)
            if name == ROPE_FACTORS and tensor.shape == self.rope.inv_freq.shape:
                self.rope = Rope(self.config, factors=tensor, device=self.device)
            elif place is not None and place.shape == tensor.shape:
                with torch.no_grad():
                    place.copy_(tensor)
            # What fits nowhere is left to the check, which knows what may.
            part = None if place is None else self._part(name)
            del tensor, place  # what is yielded may be given away, and its memory with it
            if part is not None:
                missing[part] -= 1
                if not missing[part]:
                    yield part
        check_tensors(self.config, found, self._source)

    def _part(self, name: str) -> int | None:
        """The part of the model that a tensor belongs to, as `_parts` has it; None: it is not given away."""
        if name.startswith(LAYER):
            return int(name.removeprefix(LAYER).partition(".")[0])
        return (
            HEAD if name == ("model.embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight") else None
        )

    def _places(self) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes: Hugging Face's names to views of the fused weights."""
        head = self.config.head_dim
        sizes = [self.config.num_heads * head] + [self.config.num_kv_heads * head] * 2
        places = {"model.embed_tokens.weight": self.embed}
        for index, layer in enumerate(self.layers):
            prefix = f"{LAYER}{index}"
            places[f"{prefix}.input_layernorm.weight"] = layer.input_norm
            for letter, part in zip("qkv", torch.split(layer.qkv, sizes), strict=True):
                places[f"{prefix}.self_attn.{letter}_proj.weight"] = part
            if layer.qkv_bias is not None:
                for letter, part in zip("qkv", torch.split(layer.qkv_bias, sizes), strict=True):
                    places[f"{prefix}.self_attn.{letter}_proj.bias"] = part
            if layer.q_norm is not None and layer.k_norm is not None:
                places[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
                places[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
            places[f"{prefix}.self_attn.o_proj.weight"] = layer.o
            if layer.o_bias is not None:
                places[f"{prefix}.self_attn.o_proj.bias"] = layer.o_bias
            places[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm
            gate, up = layer.gate_up.chunk(2)
            places[f"{prefix}.mlp.gate_proj.weight"] = gate
            places[f"{prefix}.mlp.up_proj.weight"] = up
            places[f"{prefix}.mlp.down_proj.weight"] = layer.down
        places["model.norm.weight"] = self.final_norm
        if self.lm_head is not self.embed:
            places["lm_head.weight"] = self.lm_head
        return places

    def forward(self, step: StepInput, kv: KVCache) -> Tensor:
        """Runs one step: writes its keys and values into ``kv`` and returns each row's next-token logits.

        :param kv: of this model's layers, KV heads, head_dim, dtype and device.
        :returns: [n, V] float32, of each row's last token.
        """
        x, last = self._layers(step, kv)
        return self._logits(x if len(x) == len(step.starts) else x.index_select(0, last))

    def forward_scored(
        self, step: StepInput, kv: KVCache, scored: Mapping[int, int], take: Callable[[int, Tensor], None]
    ) -> Tensor:
        """`forward`, and logits behind more tokens than each row's last.

        :param scored: by row's index in the step, how many of its first tokens.
        :param take: called with the index and the [c, V] float32 logits of its next c tokens.
        """
        x, last = self._layers(step, kv)
        for index, count in scored.items():
            begin = int(step.host_lengths[:index].sum())
            for at in range(begin, begin + count, MOST_SCORED):
                take(index, self._logits(x[at : min(at + MOST_SCORED, begin + count)]))
        return self._logits(x.index_select(0, last))

    def _layers(self, step: StepInput, kv: KVCache) -> tuple[Tensor, Tensor]:
        """[T, H] behind the layers, and [n] the place of each row's last token."""
        config = self.config
        attention = TorchAttention(kv)
        plan = attention.plan(step.host_starts, step.host_lengths, step.tables)
        cos, sin = self._rotation(plan.positions)
        x = F.embedding(step.tokens, self.embed)
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, self._norm(x, layer.input_norm), cos, sin)
            attended = attention.attend(index, q, k, v, plan, config.window(index))
            x = x + F.linear(attended, layer.o, layer.o_bias)
            gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down)
        return x, plan.last

    def _logits(self, x: Tensor) -> Tensor:
        """[c, V] float32 of [c, H]."""
        return F.linear(self._norm(x, self.final_norm), self.lm_head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 1, D] factors for `_rotate`: the cosines twice, and the sines with the first half negated."""
        cos, sin = self.rope.cos_sin(positions)
        return (
            torch.cat((cos, cos), dim=-1)[:, None].to(self.dtype),
            torch.cat((-sin, sin), dim=-1)[:, None].to(self.dtype),
        )

    def _qkv(self, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, heads, D] rotated queries, [T, kv_heads, D] rotated keys, and values."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), heads + 2 * kv_heads, config.head_dim)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = torch.split(qk, [heads, kv_heads], dim=1)
            qk = torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), dim=1)
        # Rolling by half a head swaps its halves: with the signs in `sin` that is the rotation, in three operators.
        qk = torch.addcmul(qk * cos, qk.roll(config.head_dim // 2, dims=-1), sin)
        q, k = torch.split(qk, [heads, kv_heads], dim=1)
        return q, k, v


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that make up a model of ``config``, by Hugging Face's names."""
    places = Decoder(config, device="meta")._places()
    return {name: tuple(place.shape) for name, place in places.items()}


def check_tensors(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Checks that tensors of these names and shapes make up a model of ``config``.

    :param source: what to call the checkpoint in an error.
    :raises ModelError: for a tensor that is missing, unknown, or of another shape.
    """
    if config.num_layers > len(shapes):  # a damaged number would have billions of layers counted up
        raise ModelError(f"{source}: has {len(shapes)} tensors, expected those of {config.num_layers} layers")
    expected = tensor_shapes(config)
    model = f"{config.architecture} of {config.num_layers} layers"
    for name, shape in shapes.items():
        # Old checkpoints store the frequencies, which follow from the configuration, and some store the embedding
        # again as the head that is tied to it.
        if name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight"):
            continue
        wanted = (config.head_dim // 2,) if name == ROPE_FACTORS else expected.get(name)
        if wanted is None:
            raise ModelError(f"{source}: tensor {name} {list(shape)} is unknown, expected none such in a {model}")
        if shape != wanted:
            raise ModelError(f"{source}: tensor {name} has shape {list(shape)}, expected {list(wanted)}")
    for name in expected:
        if name not in shapes:
            raise ModelError(
                f"{source}: tensor {name} is missing, expected with shape {list(expected[name])} in a {model}"
            )

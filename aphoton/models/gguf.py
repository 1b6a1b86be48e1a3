"""`GGUFCheckpoint`: a model in one GGUF file, as llama.cpp writes it."""

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderField, ReaderTensor
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from aphoton.errors import ModelError
from aphoton.memory import system_zeros
from aphoton.models.ahead import ahead
from aphoton.models.config import Architecture, ModelConfig, RopeScaling
from aphoton.models.decoder import ROPE_FACTORS, check_tensors
from aphoton.models.fields import Fields
from aphoton.models.ggufmetadata import GGUFMetadata, Strings
from aphoton.text.tokenizer import Tokenizer

__all__ = ["GGUFCheckpoint"]

# llama.cpp has no architecture for Mistral: it is a "llama" there.
ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

DEQUANTIZED = 1 << 14
"""Values that are dequantized at a time."""

FLOATS = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


class GGUFCheckpoint:
    """A GGUF file: weights, dequantized as they are read, and tokenizer and chat template in its metadata.

    :ivar metadata: of the file.
    :ivar chat_template: source of the default one, or None.
    :raises ModelError: when it is opened, for a file that is damaged, cut short, or not run by this engine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, tensors = _read(path)
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in tensors}
        self._shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        for name, tensor in self._tensors.items():
            if tensor.tensor_type not in FLOATS and not _can_dequantize(tensor.tensor_type):
                raise ModelError(
                    f"{path}: tensor {tensor.name} ({name}) is {tensor.tensor_type.name}, "
                    "expected a type that can be dequantized"
                )
        self.config = self._read_config()
        check_tensors(self.config, self._shapes, str(path))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in float32, under Hugging Face's names and in its layout. A few are dequantized ahead."""
        return ahead(self._weight, self._tensors)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the metadata; None when it has none."""
        if "tokenizer.ggml.tokens" not in self.metadata:
            return None
        return Tokenizer.from_gguf(self.metadata, source=str(self.path))

    @property
    def chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def _weight(self, name: str) -> tuple[str, Tensor]:
        tensor = self._tensors[name]
        weight = _dequantize(tensor).view(self._shapes[name])
        # llama.cpp's converter reorders queries and keys of this architecture for interleaved rotary pairs
        # (components 2i and 2i + 1); ours are i and i + head_dim / 2, as in Hugging Face's layout.
        if self.config.architecture == "llama" and ".self_attn.q_proj." in name:
            weight = _uninterleave(weight, self.config.num_heads)
        elif self.config.architecture == "llama" and ".self_attn.k_proj." in name:
            weight = _uninterleave(weight, self.config.num_kv_heads)
        return name, weight

    def _read_config(self) -> ModelConfig:
        fields = Fields(self.metadata, str(self.path))
        arch = fields.string("general.architecture")
        if arch not in ARCHITECTURES:
            raise fields.error("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
        for name in (f"{arch}.expert_count", "split.count"):
            count = self.metadata.get(name)
            if isinstance(count, int) and count > 1:
                expected = "one whole file" if name == "split.count" else "no mixture of experts"
                raise fields.error(name, expected)
        hidden = fields.integer(f"{arch}.embedding_length")
        heads = fields.integer(f"{arch}.attention.head_count")
        kv_heads = fields.integer(f"{arch}.attention.head_count_kv", heads)
        if heads % kv_heads:
            raise fields.error(f"{arch}.attention.head_count_kv", f"a divisor of head_count ({heads})")
        rotated = fields.integer(f"{arch}.rope.dimension_count", hidden // heads)
        head_dim = fields.integer(f"{arch}.attention.key_length", rotated)
        for name in ("attention.value_length", "rope.dimension_count"):
            if fields.integer(f"{arch}.{name}", head_dim) != head_dim:
                raise fields.error(f"{arch}.{name}", f"the length of a head ({head_dim})")
        if head_dim % 2:
            raise ModelError(f"{self.path}: a head has {head_dim} components, expected an even number")
        layers = fields.integer(f"{arch}.block_count")
        context = fields.integer(f"{arch}.context_length")
        scaling = _rope_scaling(fields, arch, context)
        window = None
        if arch == "llama" and fields.has(f"{arch}.attention.sliding_window"):
            window = fields.integer(f"{arch}.attention.sliding_window")
        embedding = self._shapes.get("model.embed_tokens.weight")
        if embedding is None:
            raise ModelError(f"{self.path}: tensor token_embd.weight is missing")
        ends = [fields.ids(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        bos = fields.ids("tokenizer.ggml.bos_token_id")
        return ModelConfig(
            architecture=ARCHITECTURES[arch],
            vocab_size=embedding[0],
            hidden_size=hidden,
            intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number(f"{arch}.rope.freq_base", 10000.0),
            rope_scaling=scaling,
            max_model_len=context,
            tie_embeddings="lm_head.weight" not in self._shapes,
            qkv_bias=arch == "qwen2" or "model.layers.0.self_attn.q_proj.bias" in self._shapes,
            o_bias="model.layers.0.self_attn.o_proj.bias" in self._shapes,
            qk_norm=arch == "qwen3",
            layer_windows=(window,) * layers if window is not None else (),
            eos_token_ids=tuple(dict.fromkeys(token for tokens in ends for token in tokens)),
            bos_token_id=bos[0] if bos else None,
            dtype=self._dtype(),
        )

    def _dtype(self) -> str:
        """Of the matrices. Quantized ones do not say what they were made from; bfloat16 has the range for all."""
        matrix = self._tensors.get("model.layers.0.mlp.down_proj.weight")
        return FLOATS.get(matrix.tensor_type, "bfloat16") if matrix is not None else "bfloat16"


def _rope_scaling(fields: Fields, arch: str, context: int) -> RopeScaling | None:
    # Llama 3's has no metadata: its factors come as the tensor rope_freqs.
    prefix = f"{arch}.rope.scaling"
    legacy = f"{arch}.rope.scale_linear"
    factor = fields.number(f"{prefix}.factor", fields.number(legacy, 1.0))
    kind = fields.string(f"{prefix}.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    original = fields.integer(f"{prefix}.original_context_length", context)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor, original_max_len=original)
    if kind == "yarn":
        if fields.number(f"{arch}.rope.freq_base", 10000.0) <= 1:  # its logarithm tells the frequencies apart
            raise fields.error(f"{arch}.rope.freq_base", "more than 1 for yarn")
        for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if fields.number(f"{prefix}.{name}", 1.0) != 1.0:
                raise fields.error(f"{prefix}.{name}", "1")
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_len=original,
            beta_fast=fields.number(f"{prefix}.yarn_beta_fast", 32.0),
            beta_slow=fields.number(f"{prefix}.yarn_beta_slow", 1.0),
        )
    raise fields.error(f"{prefix}.type", "none, linear or yarn")


def _hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` as ``model.layers.3.self_attn.q_proj.weight``; a name that is not known, as it is."""
    if name == ROPE_FACTORS:
        return name
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and part in LAYER_NAMES:
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    return name


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape.tolist()))  # GGUF counts the innermost first


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    block, size = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return block > 1


def _dequantize(tensor: ReaderTensor) -> Tensor:
    """A tensor's rows, [rows, columns] in float32. Some rows at a time: the package's intermediate arrays take several
    times as much as the result, which may be gigabytes."""
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    columns = int(tensor.shape[0])
    weight = system_zeros((len(data), columns), torch.float32)
    rows = weight.numpy()
    some = max(1, DEQUANTIZED // columns)
    for begin in range(0, len(data), some):
        rows[begin : begin + some] = dequantize(data[begin : begin + some], tensor.tensor_type)
    _forget(tensor)
    return weight


def _forget(tensor: ReaderTensor) -> None:
    """Let the file's pages go that have been read: until the file is closed they would count as this process's."""
    file = tensor.data.base
    while isinstance(file, np.ndarray):
        file = file.base
    if not isinstance(file, mmap.mmap) or not hasattr(file, "madvise"):
        return
    begin = int(tensor.data_offset) // mmap.PAGESIZE * mmap.PAGESIZE
    end = int(tensor.data_offset) + int(tensor.n_bytes)
    # The page at either end is a neighbour's too. That one may be read at this moment: it comes again, from the file.
    file.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _uninterleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, n/2, 1, n/2 + 1, ...) back to (0, 1, 2, ...)."""
    rows = weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2)
    ordered = system_zeros(tuple(weight.shape), weight.dtype)
    ordered.view(rows.shape).copy_(rows)
    return ordered


def _read(path: Path) -> tuple[GGUFMetadata, list[ReaderTensor]]:
    """The metadata and the tensors of a file; the tensors' data stay in it, mapped."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path}: begins with {magic!r}, expected a GGUF file, which begins with b'GGUF'")
    try:
        reader = _Reader(path)
        # "GGUF." are the reader's own, of the file's header.
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        metadata = GGUFMetadata(fields)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        # What the reader raises depends on where a file is damaged.
        size = path.stat().st_size
        raise ModelError(
            f"{path}: damaged or cut short: {error}; expected a whole GGUF file, has {size} bytes"
        ) from error
    if reader.byte_order == "S":
        raise ModelError(f"{path}: is of the other byte order, expected this machine's")
    return metadata, reader.tensors


class _Reader(GGUFReader):
    """gguf's reader, with arrays read in one go and sizes checked.

    Both methods replace ones of the package's that are not public: should it rename them, reading goes on with its
    own, slower and with less to say about a file that is cut short.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Of one metadata value. A vocabulary has 100,000 strings; the package takes 40 us and 300 bytes for each. Here
        an array of them is one part."""
        data = self.data.data  # slices of a memmap itself cost ten times as much
        position = orig_offs + 12
        kind, count = struct.unpack_from("<IQ", data, orig_offs) if raw_type == GGUFValueType.ARRAY else (None, 0)
        scalar = self.gguf_scalar_to_np.get(kind)
        if self.byte_order == "S" or (kind != GGUFValueType.STRING and scalar is None):
            return super()._get_field_parts(orig_offs, raw_type)
        parts: list[Any] = [data[orig_offs : orig_offs + 4], data[orig_offs + 4 : position]]
        if scalar is not None:
            parts.append(np.frombuffer(data, scalar, count, position))
            position += parts[-1].nbytes
        else:
            strings = Strings(data[position:], count)
            parts.append(strings)
            position += strings.size
        return position - orig_offs, parts, list(range(2, len(parts))), [GGUFValueType.ARRAY, GGUFValueType(kind)]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            _, name, _, shape, kind, offset = field.parts
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
            end = start_offs + int(offset[0]) + math.prod(shape.tolist()) // block * size
            if end > len(self.data):
                raise ValueError(f"tensor {bytes(name).decode()} ends at byte {end}")
        super()._build_tensors(start_offs, fields)

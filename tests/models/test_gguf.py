"""GGUF files: the same logits as the weights that they were written from, and errors that say what is wrong."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize

from aphoton.errors import ModelError
from aphoton.models import Decoder, open_checkpoint
from aphoton.models.gguf import _Reader
from aphoton.models.ggufmetadata import GGUFMetadata

F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
Q8_0, BF16 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleave(array, heads):
    """What llama.cpp's converter does to queries and keys of Llama and Mistral."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


class File:
    """A GGUF file of a model of transformers, with everything in it open to change before `write`."""

    def __init__(self, path, model, arch):
        config = model.config
        self.path = path
        self.arch = arch
        self.endian = GGUFEndian.LITTLE
        self.matrix_type = F32
        self.values = {
            "context_length": 64,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": config.rope_parameters["rope_theta"],
        }
        head_dim = getattr(config, "head_dim", None)
        if head_dim:
            self.values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        self.tokenizer = {
            "model": "gpt2",
            "tokens": [f"t{i}" for i in range(config.vocab_size)],
            "token_type": [1] * config.vocab_size,
            "merges": ["t 1", "t 2"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "add_bos_token": False,
        }
        self.others = {}
        self.tensors = {}
        for name, tensor in model.state_dict().items():
            if config.tie_word_embeddings and name == "lm_head.weight":
                continue
            array = tensor.numpy()
            if arch == "llama" and "q_proj" in name:
                array = interleave(array, config.num_attention_heads)
            if arch == "llama" and "k_proj" in name:
                array = interleave(array, config.num_key_value_heads)
            stem, kind = name.rsplit(".", 1)
            if stem in NAMES:
                stem = NAMES[stem]
            else:
                _, _, layer, part = stem.split(".", 3)
                stem = f"blk.{layer}.{LAYER_NAMES[part]}"
            self.tensors[f"{stem}.{kind}"] = array

    def write(self):
        writer = GGUFWriter(self.path, self.arch, endianess=self.endian)
        values = {f"{self.arch}.{key}": value for key, value in self.values.items()}
        values |= {f"tokenizer.ggml.{key}": value for key, value in self.tokenizer.items()}
        for key, value in (values | self.others).items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_string(key, value)
        for name, array in self.tensors.items():
            kind = self.matrix_type if array.ndim == 2 else F32
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.path


@pytest.fixture
def llama(tmp_path, make_reference):
    return File(tmp_path / "model.gguf", make_reference("Llama"), "llama")


PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


def logits(path, rows):
    checkpoint = open_checkpoint(path)
    run = rows(Decoder.load(checkpoint.config, checkpoint.weights()))
    return torch.stack([run.feed({"a": PROMPT[:6]})["a"], *(run.feed({"a": [t]})["a"] for t in PROMPT[6:])])


CASES = {
    "llama": ("Llama", "llama", {}),
    "llama, biases, tied": ("Llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral, window": ("Mistral", "llama", {"sliding_window": 5}),
    "qwen2": ("Qwen2", "qwen2", {}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_weights_written(case, tmp_path, make_reference, rows):
    kind, arch, settings = CASES[case]
    model = make_reference(kind, **settings)
    file = File(tmp_path / "model.gguf", model, arch)
    if settings.get("sliding_window"):
        file.values["attention.sliding_window"] = settings["sliding_window"]
    expected = model(torch.tensor([PROMPT])).logits[0, 5:]
    torch.testing.assert_close(logits(file.write(), rows), expected, rtol=1e-4, atol=1e-4)


def test_llama3_frequencies_come_as_a_tensor(tmp_path, make_reference, rows):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 0.2,
        "high_freq_factor": 1.5,
        "original_max_position_embeddings": 12,
        "rope_theta": 500.0,
    }
    model = make_reference("Llama", rope_parameters=rope)
    file = File(tmp_path / "model.gguf", model, "llama")
    plain = 500.0 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
    file.tensors["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq.numpy()
    expected = model(torch.tensor([PROMPT])).logits[0, 5:]
    torch.testing.assert_close(logits(file.write(), rows), expected, rtol=1e-4, atol=1e-4)
    del file.tensors["rope_freqs.weight"]
    assert (logits(file.write(), rows) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        ({"rope.scale_linear": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        (
            {
                "rope.scaling.type": RopeScalingType.YARN.value,
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 12,
                "rope.scaling.yarn_beta_fast": 1.5,
                "rope.scaling.yarn_beta_slow": 0.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 12,
                "beta_fast": 1.5,
                "beta_slow": 0.5,
            },
        ),
    ],
)
def test_scaling_in_the_metadata(values, rope, tmp_path, make_reference, rows):
    model = make_reference("Qwen2", rope_parameters=rope | {"rope_theta": 1000.0})
    file = File(tmp_path / "model.gguf", model, "qwen2")
    file.values |= values
    expected = model(torch.tensor([PROMPT])).logits[0, 5:]
    torch.testing.assert_close(logits(file.write(), rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(F32, "float32"), (F16, "float16"), (BF16, "bfloat16"), (Q8_0, "bfloat16")]
)
def test_weights_are_dequantized(kind, dtype, llama):
    llama.matrix_type = kind
    checkpoint = open_checkpoint(llama.write())
    assert checkpoint.config.dtype == dtype
    weights = dict(checkpoint.weights())
    expected = dequantize(quantize(llama.tensors["blk.1.ffn_down.weight"], kind), kind)
    assert weights["model.layers.1.mlp.down_proj.weight"].tolist() == expected.tolist()
    assert weights["model.norm.weight"].tolist() == llama.tensors["output_norm.weight"].tolist()
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def test_config_and_metadata(llama):
    llama.others["tokenizer.chat_template"] = "{{ messages }}"
    llama.tokenizer |= {"eot_token_id": 5, "scores": [0.5] * 97}
    checkpoint = open_checkpoint(llama.write())
    config = checkpoint.config
    assert (config.vocab_size, config.head_dim, config.max_model_len) == (97, 16, 64)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 5), 1)
    assert not config.tie_embeddings
    assert config.rope_scaling is None
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(97)]
    assert checkpoint.metadata["tokenizer.ggml.token_type"] == [1] * 97
    assert checkpoint.metadata["tokenizer.ggml.scores"] == pytest.approx([0.5] * 97)
    assert checkpoint.metadata["tokenizer.ggml.add_bos_token"] is False


def test_tokenizer_and_template_may_be_missing(llama):
    llama.tokenizer.clear()
    checkpoint = open_checkpoint(llama.write())
    assert checkpoint.tokenizer() is None
    assert checkpoint.chat_template is None
    assert checkpoint.config.eos_token_ids == ()


def test_a_head_may_be_told_by_its_rotation_or_by_the_width(llama):
    del llama.values["attention.key_length"], llama.values["attention.value_length"]
    assert open_checkpoint(llama.write()).config.head_dim == 16
    llama.values["rope.dimension_count"] = 16
    assert open_checkpoint(llama.write()).config.head_dim == 16


def set_value(key, value):
    def change(file):
        file.values[key] = value

    return change


def set_yarn(file):
    file.values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_attn_factor": 0.5}


def drop_value(key):
    def change(file):
        del file.values[key]

    return change


def set_other(key, value):
    def change(file):
        file.others[key] = value

    return change


def drop_tensor(name):
    def change(file):
        del file.tensors[name]

    return change


def set_tensor(name, *shape):
    def change(file):
        file.tensors[name] = np.zeros(shape, np.float32)

    return change


def set_arch(arch):
    def change(file):
        file.arch = arch

    return change


def swap_bytes(file):
    file.endian = GGUFEndian.BIG


WRONG = [
    (set_arch("gpt2"), r"general\.architecture is 'gpt2', expected one of llama, qwen2, qwen3"),
    (drop_value("block_count"), r"llama\.block_count is missing, expected a positive integer"),
    (set_value("block_count", "three"), r"llama\.block_count is 'three', expected a positive integer"),
    (drop_value("attention.layer_norm_rms_epsilon"), r"layer_norm_rms_epsilon is missing, expected a positive number"),
    (set_value("attention.head_count_kv", 3), r"head_count_kv is 3, expected a divisor of head_count \(4\)"),
    (set_value("attention.value_length", 8), r"value_length is 8, expected the length of a head \(16\)"),
    (set_value("rope.dimension_count", 8), r"dimension_count is 8, expected the length of a head \(16\)"),
    (
        lambda file: file.values.update(
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1.0}
        ),
        r"rope\.freq_base is 1\.0, expected more than 1 for yarn",
    ),
    (set_value("rope.scaling.type", "longrope"), r"scaling\.type is 'longrope', expected none, linear or yarn"),
    (set_yarn, r"yarn_attn_factor is 0\.5, expected 1"),
    (set_value("expert_count", 8), r"expert_count is 8, expected no mixture of experts"),
    (set_other("split.count", 3), r"split\.count is 3, expected one whole file"),
    (drop_tensor("token_embd.weight"), r"tensor token_embd\.weight is missing"),
    (drop_tensor("output_norm.weight"), r"tensor model\.norm\.weight is missing, expected with shape \[64\]"),
    (
        drop_tensor("blk.2.ffn_up.weight"),
        r"tensor model\.layers\.2\.mlp\.up_proj\.weight is missing, expected with shape \[96, 64\]",
    ),
    (
        set_tensor("blk.0.ffn_up.weight", 95, 64),
        r"tensor model\.layers\.0\.mlp\.up_proj\.weight has shape \[95, 64\], expected \[96, 64\]",
    ),
    (set_tensor("blk.0.ssm_conv.weight", 4, 4), r"tensor blk\.0\.ssm_conv\.weight \[4, 4\] is unknown"),
    (set_tensor("blk.3.attn_norm.weight", 64), r"model\.layers\.3\.input_layernorm\.weight \[64\] is unknown"),
    (swap_bytes, r"other byte order"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_file_that_is_wrong(change, message, llama):
    change(llama)
    with pytest.raises(ModelError, match=rf"model\.gguf: .*{message}"):
        open_checkpoint(llama.write())


def test_a_type_that_cannot_be_dequantized(llama):
    path = llama.write()
    data = path.read_bytes()
    # The type follows the name, the number of dimensions and the two dimensions.
    place = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    assert data[place : place + 4] == F32.to_bytes(4, "little")
    path.write_bytes(data[:place] + GGMLQuantizationType.I32.to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(ModelError, match=r"model\.gguf: tensor blk\.0\.ffn_up\.weight .* is I32"):
        open_checkpoint(path)


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match=r"model\.gguf: begins with b'PK\\x03\\x04', expected a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.gguf: begins with b'', expected a GGUF file"):
        open_checkpoint(path)


def test_no_file(tmp_path):
    with pytest.raises(ModelError, match=r"model\.gguf: no such file or folder, expected"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_file_cut_short_anywhere(llama):
    path = llama.write()
    data = path.read_bytes()
    for size in [*range(4, 6000, 97), *range(6000, len(data), 9973), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(
            ModelError, match=rf"model\.gguf: damaged or cut short: .* whole GGUF file, has {size} bytes"
        ):
            open_checkpoint(path)


def test_a_file_cut_short_says_what_it_lacks(llama):
    path = llama.write()
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(ModelError, match=r"tensor \S+ ends at byte \d+; expected a whole GGUF file"):
        open_checkpoint(path)


def test_a_damaged_header_is_an_error_or_harmless(llama):
    path = llama.write()
    data = path.read_bytes()
    header = data.index(b"output.weight")
    random = np.random.default_rng(0)
    messages = []
    for place in random.integers(4, header, 300):
        damaged = bytearray(data)
        damaged[place] ^= 1 << random.integers(8)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(path) in message for message in messages)


def test_arrays_are_read_as_the_package_reads_them(llama):
    """The reader replaces methods of the package's that are not public; they must still be there, and agree."""
    llama.others |= {
        "a.floats": [0.5, 1.5],
        "a.bools": [True, False],
        "a.empty strings": ["", "é"],
        "a.nested": [[1, 2], [3]],
        "a.nested strings": [["a", "bc"], ["d"]],
    }
    path = llama.write()
    ours, package = _Reader(path), GGUFReader(path)
    # Each by its own way to a field's value: an array of strings is one part here, and one for each string there.
    assert dict(GGUFMetadata(ours.fields)) == {key: field.contents() for key, field in package.fields.items()}
    assert hasattr(GGUFReader, "_get_field_parts")
    assert hasattr(GGUFReader, "_build_tensors")


@pytest.mark.real_model
def test_smollm2_is_read_as_it_was_written(smollm2, rows):
    """Against transformers with the same dequantized weights."""
    import transformers

    checkpoint = open_checkpoint(smollm2)
    config = checkpoint.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        )
    ).eval()
    weights = dict(checkpoint.weights())
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert (config.eos_token_ids, config.max_model_len, config.tie_embeddings) == ((2,), 8192, True)
    assert checkpoint.chat_template is not None
    tokens = checkpoint.tokenizer().encode("The capital of France is Paris, and that of Italy is")
    run = rows(Decoder.load(config, weights.items()), page_size=16, pages=8)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(run.feed({"a": tokens[:-1]})["a"], expected[-2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(run.feed({"a": tokens[-1:]})["a"], expected[-1], rtol=1e-3, atol=1e-3)

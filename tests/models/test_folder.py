"""Model folders: what `config.json` means, and errors that say what is wrong."""

import json

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from aphoton.errors import ModelError
from aphoton.models import Decoder, RopeScaling, open_checkpoint


@pytest.fixture
def folder(make_reference, save):
    return save(make_reference("Llama"))


def edit(folder, name="config.json", **changes):
    """Sets fields of a JSON file; ``...`` takes one out."""
    file = folder / name
    values = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def config_of(folder):
    return open_checkpoint(folder).config


def test_config(folder):
    edit(folder, dtype="bfloat16", eos_token_id=[2, 3], max_position_embeddings=64)
    config = config_of(folder)
    assert config.architecture == "llama"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (97, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.max_model_len) == (1e-6, 10000.0, 64)
    assert (config.bos_token_id, config.dtype) == (1, "bfloat16")
    assert config.rope_scaling is None
    assert config.window(0) is None


def test_end_tokens_of_the_generation_config_come_first(folder):
    (folder / "generation_config.json").unlink()
    edit(folder, eos_token_id=[2, 3])
    assert config_of(folder).eos_token_ids == (2, 3)
    edit(folder, "generation_config.json", eos_token_id=[7, 8, 9])
    assert config_of(folder).eos_token_ids == (7, 8, 9)
    edit(folder, "generation_config.json", eos_token_id=7)
    assert config_of(folder).eos_token_ids == (7,)
    edit(folder, "generation_config.json", eos_token_id=...)
    edit(folder, eos_token_id=None)
    assert config_of(folder).eos_token_ids == ()


YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 20.0, "attention_factor": 1.2}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    ("kind", "settings", "scaling", "longest"),
    [
        ("default", {}, None, 64),
        (
            "linear",
            {"factor": 2.0},
            RopeScaling(kind="linear", factor=2.0, original_max_len=64),
            128,
        ),
        (
            "dynamic",
            {"factor": 3.0},
            RopeScaling(kind="dynamic", factor=3.0, original_max_len=64),
            192,
        ),
        (
            "yarn",
            YARN,
            RopeScaling(kind="yarn", factor=4.0, original_max_len=16, beta_fast=20.0, attention_factor=1.2),
            64,
        ),
        (
            "llama3",
            LLAMA3,
            RopeScaling(kind="llama3", factor=8.0, original_max_len=16, low_freq_factor=1.0, high_freq_factor=4.0),
            64,
        ),
    ],
)
def test_rope_as_either_version_writes_it(version, kind, settings, scaling, longest, folder):
    if version == 5:
        edit(folder, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **settings})
    elif kind == "default":
        edit(folder, rope_parameters=..., rope_theta=5000.0, rope_scaling=None)
    else:
        edit(folder, rope_parameters=..., rope_theta=5000.0, rope_scaling={"type": kind, **settings})
    config = config_of(folder)
    assert (config.rope_theta, config.rope_scaling, config.max_model_len) == (5000.0, scaling, longest)


def test_yarn_factor_may_follow_from_the_lengths(folder):
    edit(folder, rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 16})
    assert config_of(folder).rope_scaling.factor == 4.0


def test_windows_of_mistral(make_reference, save):
    folder = save(make_reference("Mistral", sliding_window=9))
    assert config_of(folder).layer_windows == (9, 9, 9)
    edit(folder, sliding_window=None)
    assert config_of(folder).layer_windows == ()
    edit(folder, sliding_window=...)  # as transformers: the first Mistral's
    assert config_of(folder).layer_windows == (4096,) * 3


def test_windows_of_qwen(make_reference, save):
    folder = save(make_reference("Qwen2"))
    edit(folder, use_sliding_window=True, sliding_window=9, max_window_layers=2, layer_types=...)
    assert config_of(folder).layer_windows == (None, None, 9)
    edit(folder, layer_types=["sliding_attention", "full_attention", "full_attention"])
    assert config_of(folder).layer_windows == (9, None, None)
    edit(folder, use_sliding_window=False)
    assert config_of(folder).layer_windows == ()
    for other in ("linear_attention", ["full_attention"], None):
        edit(folder, use_sliding_window=True, layer_types=["sliding_attention", other, "full_attention"])
        with pytest.raises(ModelError, match=r"layer_types is .*, expected 3 of sliding_attention, full_attention"):
            open_checkpoint(folder)


WRONG = [
    ({"architectures": ["MixtralForCausalLM"]}, r"architectures is \['MixtralForCausalLM'\], expected one of Llama"),
    ({"architectures": None}, r"architectures is None, expected one of LlamaForCausalLM"),
    ({"architectures": [["LlamaForCausalLM"]]}, r"architectures is \[\['LlamaForCausalLM'\]\], expected one of Llama"),
    ({"architectures": [{}]}, r"architectures is \[\{\}\], expected one of Llama"),
    ({"hidden_size": ...}, r"hidden_size is missing, expected a positive integer"),
    ({"hidden_size": "64"}, r"hidden_size is '64', expected a positive integer"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers is 0, expected a positive integer"),
    ({"num_hidden_layers": 10**9}, r"has 30 tensors, expected those of 1000000000 layers"),
    ({"rms_norm_eps": -1}, r"rms_norm_eps is -1, expected a positive number"),
    ({"tie_word_embeddings": "no"}, r"tie_word_embeddings is 'no', expected true or false"),
    ({"num_key_value_heads": 3}, r"num_key_value_heads is 3, expected a divisor of num_attention_heads \(4\)"),
    ({"head_dim": 15}, r"head_dim is 15, expected an even number"),
    ({"eos_token_id": "end"}, r"eos_token_id is 'end', expected token ids"),
    ({"quantization_config": {"bits": 4}}, r"has a quantization_config, expected weights that are not"),
    ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected 'silu'"),
    ({"mlp_bias": True}, r"mlp_bias is True, expected false"),
    ({"dtype": "float8_e4m3fn"}, r"dtype is 'float8_e4m3fn', expected float32, bfloat16 or float16"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, expected 1"),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\], expected an object"),
    ({"rope_parameters": {"rope_type": "longrope"}}, r"rope_type is 'longrope', expected default, linear, dynamic"),
    ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters: factor is missing, expected a positive number"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 1e29}},
        r"rope_parameters: factor is 1e\+29, expected one that makes from 1 to below 2\*\*31 positions of 64",
    ),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 1e-9}}, r"factor is 1e-09, expected one that makes"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 1e29}}, r"factor is 1e\+29, expected one that makes"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1.0}},
        r"rope_parameters: rope_theta is 1\.0, expected more than 1 for yarn",
    ),
    (
        {"rope_parameters": ..., "rope_theta": 0.5, "rope_scaling": {"type": "yarn", "factor": 4}},
        r"config\.json: rope_theta is 0\.5, expected more than 1 for yarn",
    ),
    ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters: differs by layer"),
    (
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
        r"high_freq_factor is 4\.0, expected more than low_freq_factor \(4\)",
    ),
    (
        {"tie_word_embeddings": False, "vocab_size": 98},
        r"(embed_tokens|lm_head)\.weight has shape \[97, 64\], expected \[98, 64\]",
    ),
    ({"attention_bias": True}, r"q_proj\.bias is missing, expected with shape \[64\] in a llama of 3 layers"),
    ({"num_hidden_layers": 2}, r"model\.layers\.2\.\S+ \[\d+(, \d+)?\] is unknown, expected none such in a llama of 2"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_config_that_is_wrong(changes, message, folder):
    (folder / "generation_config.json").unlink()
    edit(folder, **changes)
    with pytest.raises(ModelError, match=rf"^{folder}.*{message}"):
        open_checkpoint(folder)


def test_no_config(tmp_path):
    with pytest.raises(ModelError, match=rf"^{tmp_path}: has no config\.json, expected a model folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read: .*"), ("[]", "holds a list, "), ("[" * 200_000, "cannot be read: maximum recursion .*")],
    ids=["cut", "list", "deep"],
)
def test_a_config_that_is_no_json_object(text, message, name, folder):
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=rf"/{name}: {message}.*expected a JSON object"):
        open_checkpoint(folder)


def test_a_missing_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"^{folder}: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_file_cut_short(keep, folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelError, match=rf"^{file}: not a whole safetensors file: "):
        open_checkpoint(folder)


def test_shards(make_reference, tmp_path, rows):
    model = make_reference("Qwen3", head_dim=32)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)
    prompt = [5, 6, 7, 8]
    logits = rows(Decoder.load(checkpoint.config, checkpoint.weights())).feed({"a": prompt})["a"]
    torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_a_missing_shard(make_reference, tmp_path):
    make_reference("Llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelError, match=rf"^{shard}: no such file; expected by model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)
    edit(tmp_path, "model.safetensors.index.json", weight_map={})
    with pytest.raises(ModelError, match=r"index\.json: weight_map is {}, expected names of tensors"):
        open_checkpoint(tmp_path)
    edit(tmp_path, "model.safetensors.index.json", weight_map={"lm_head.weight": "x" * 5000})  # longer than a name is
    with pytest.raises(ModelError, match=r"x: no such file; expected by model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"model\.safetensors: no such file; expected it, or model\.safetensors\.index"
    ):
        open_checkpoint(folder)


def test_chat_template(folder):
    assert open_checkpoint(folder).chat_template is None
    edit(folder, "tokenizer_config.json", chat_template="from the tokenizer")
    assert open_checkpoint(folder).chat_template == "from the tokenizer"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit(folder, "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(folder).chat_template == "plain"
    edit(folder, "tokenizer_config.json", chat_template=named[:1])
    assert open_checkpoint(folder).chat_template is None
    for wrong in (7, [7], [{"name": "default"}], [{"name": "default", "template": 7}]):
        edit(folder, "tokenizer_config.json", chat_template=wrong)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template is .*, expected a string"):
            assert open_checkpoint(folder).chat_template
    (folder / "chat_template.jinja").write_text("from its own file")
    assert open_checkpoint(folder).chat_template == "from its own file"
    (folder / "chat_template.jinja").write_bytes("à".encode("latin-1"))
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read: .*; expected text in UTF-8"):
        assert open_checkpoint(folder).chat_template


def test_tokenizer(folder):
    assert open_checkpoint(folder).tokenizer() is None
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    letters.save(str(folder / "tokenizer.json"))
    assert open_checkpoint(folder).tokenizer().encode("ab") == [alphabet.index("a"), alphabet.index("b")]


def test_a_config_written_by_hand_needs_no_more_than_the_sizes(folder):
    """What old files leave out is what transformers takes for it."""
    values = json.loads((folder / "config.json").read_text())
    kept = (
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    (folder / "config.json").write_text(json.dumps({name: values[name] for name in kept}))
    config, theirs = config_of(folder), transformers.LlamaConfig()
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert config.qkv_bias == theirs.attention_bias
    assert config.head_dim == 16

"""Logits against transformers, and what is said of weights that do not fit."""

import weakref
from inspect import signature

import msgspec
import pytest
import torch
import transformers
from kernels.decoders import Rows, random_decoder

from aphoton.errors import ModelError
from aphoton.models import Decoder, ModelConfig, open_checkpoint
from aphoton.models.decoder import tensor_shapes

TRAINED = 12  # positions: rows go beyond it, so that every kind of scaling has its say

CASES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "llama, a KV head per head": ("Llama", {"num_key_value_heads": 4}),
    "llama, one KV head": ("Llama", {"num_key_value_heads": 1}),
    "llama, heads wider than the model": ("Llama", {"head_dim": 24}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3}}),
    "llama, dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            "max_position_embeddings": TRAINED,
        },
    ),
    "llama, llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 0.2,
                "high_freq_factor": 1.5,
                "original_max_position_embeddings": TRAINED,
                "rope_theta": 5e2,
            }
        },
    ),
    "llama, yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": TRAINED,
                "rope_theta": 1e3,
                "beta_fast": 1.5,
                "beta_slow": 0.1,
            }
        },
    ),
    "llama, yarn, bounds not rounded, own attention factor": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": TRAINED,
                "rope_theta": 1e3,
                "beta_fast": 1.5,
                "beta_slow": 0.1,
                "truncate": False,
                "attention_factor": 0.9,
            }
        },
    ),
    "llama, yarn, mscale": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": TRAINED,
                "rope_theta": 1e3,
                "mscale": 1.3,
                "mscale_all_dim": 0.7,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 6}),
    "mistral, window of one": ("Mistral", {"sliding_window": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, tied, biases": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}

# Tokens that each row feeds in each step: whole prompts, chunks behind a prefix, and decode rows, side by side.
SCHEDULE = [
    {"a": 9, "c": 5},
    {"a": 1, "b": 1, "c": 12},
    {"c": 1, "d": 7, "a": 1, "b": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"b": 19, "d": 2, "c": 1},
    {"d": 1, "a": 3, "b": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"c": 1},
    {"a": 8},
    {"a": 1},
]


def draw_tokens(vocab_size):
    generator = torch.Generator().manual_seed(1)
    totals = {}
    for step in SCHEDULE:
        for name, count in step.items():
            totals[name] = totals.get(name, 0) + count
    return {
        name: torch.randint(vocab_size, (total,), generator=generator).tolist()
        for name, total in sorted(totals.items())
    }


def reference_logits(model, tokens, *, one_by_one):
    """[len(tokens), V]"""
    if not one_by_one:
        return model(torch.tensor([tokens])).logits[0]
    cache = transformers.DynamicCache(config=model.config)
    # The parameter has had both names in transformers 5.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    fed = (model(torch.tensor([[token]]), use_cache=True, **{name: cache}) for token in tokens)
    return torch.cat([out.logits[0] for out in fed])


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, make_reference, save, rows):
    kind, settings = CASES[case]
    model = make_reference(kind, **settings)
    checkpoint = open_checkpoint(save(model))
    decoder = Decoder.load(checkpoint.config, checkpoint.weights())
    tokens = draw_tokens(checkpoint.config.vocab_size)
    # transformers' dynamic frequencies follow the longest that has been fed at once; ours follow the position.
    expected = {name: reference_logits(model, line, one_by_one="dynamic" in case) for name, line in tokens.items()}
    for page_size in (1, 4, 64):
        run = rows(decoder, page_size=page_size)
        for step in SCHEDULE:
            starts = {name: run.lengths.get(name, 0) for name in step}
            fed = {name: tokens[name][starts[name] : starts[name] + count] for name, count in step.items()}
            for name, logits in run.feed(fed).items():
                torch.testing.assert_close(logits, expected[name][run.lengths[name] - 1], rtol=1e-4, atol=1e-4)


def test_the_cases_differ(make_reference):
    """A setting that changed nothing would make its case a test of nothing."""
    line = draw_tokens(97)["c"]
    plain = {
        kind: make_reference(kind, **({"sliding_window": None} if kind == "Mistral" else {}))(
            torch.tensor([line])
        ).logits
        for kind in ("Llama", "Mistral", "Qwen2")
    }
    for case, (kind, settings) in CASES.items():
        if kind in plain and ("rope_parameters" in settings or settings.get("sliding_window")):
            logits = make_reference(kind, **settings)(torch.tensor([line])).logits
            assert (logits - plain[kind]).abs().max() > 1e-2, case


def test_bfloat16_is_near_float32(make_reference, save, rows):
    checkpoint = open_checkpoint(save(make_reference("Qwen3", head_dim=32)))
    prompt = draw_tokens(97)["c"]
    near, exact = (
        rows(Decoder.load(checkpoint.config, checkpoint.weights(), dtype=dtype)).feed({"a": prompt})["a"]
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert (near - exact).abs().max() < 0.05 * exact.abs().max()


def test_tied_embeddings_are_one_tensor(make_reference, save):
    checkpoint = open_checkpoint(save(make_reference("Llama", tie_word_embeddings=True)))
    decoder = Decoder.load(checkpoint.config, checkpoint.weights())
    assert decoder.lm_head is decoder.embed


def tiny() -> ModelConfig:
    return ModelConfig(
        architecture="qwen2",
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_model_len=32,
        tie_embeddings=True,
        qkv_bias=True,
    )


def tiny_weights():
    return {name: torch.ones(shape) for name, shape in tensor_shapes(tiny()).items()}


def test_load_names_a_missing_tensor():
    weights = tiny_weights()
    del weights["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ModelError, match=r"here: tensor model\.layers\.1\.self_attn\.k_proj\.bias is missing.*\[4\]"):
        Decoder.load(tiny(), weights.items(), source="here")


def test_load_names_a_tensor_of_another_shape():
    weights = tiny_weights() | {"model.layers.0.mlp.down_proj.weight": torch.ones(8, 13)}
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight has shape \[8, 13\], expected \[8, 12\]"):
        Decoder.load(tiny(), weights.items())


def test_load_names_a_tensor_that_the_model_has_no_place_for():
    weights = tiny_weights() | {"model.layers.0.self_attn.o_proj.bias": torch.ones(8)}
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.o_proj\.bias \[8\] is unknown"):
        Decoder.load(tiny(), weights.items())


def test_load_passes_over_what_follows_from_the_rest():
    weights = tiny_weights() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": torch.zeros(11, 8),
    }
    decoder = Decoder.load(tiny(), weights.items())
    assert (decoder.lm_head == 1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_handed_over_as_they_are_read(tied):
    """And nobody holds what has been read or given away."""
    config = msgspec.structs.replace(tiny(), tie_embeddings=tied)
    made = {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}
    expected = Decoder.load(config, made.items())
    given, seen = [], []

    def read():
        for name, tensor in made.items():
            assert all(held() is None for held in given)
            copies = [tensor.clone()]
            given.append(weakref.ref(copies[0]))
            yield name, copies.pop()

    def take_layer(index, layer):
        assert all(held() is None for held in given)
        assert torch.equal(layer.qkv, expected.layers[index].qkv)
        assert torch.equal(layer.down, expected.layers[index].down)
        given.append(weakref.ref(layer.qkv))
        seen.append(index)

    def take_head(head):
        assert torch.equal(head, expected.lm_head)
        given.append(weakref.ref(head))
        seen.append("head")

    decoder = Decoder.open(config, read())
    assert seen == []
    decoder.hand_over(take_layer, take_head)
    assert seen == (["head", 0, 1] if tied else [0, 1, "head"])
    assert all(held() is None for held in given)
    assert torch.equal(decoder.final_norm, expected.final_norm)
    assert decoder.layers == [] and decoder.embed.shape == ((0, 8) if tied else (11, 8))


def test_what_is_missing_is_named_when_the_rest_has_been_handed_over():
    weights = tiny_weights()
    del weights["model.layers.0.self_attn.o_proj.weight"]
    seen = []
    decoder = Decoder.open(tiny(), weights.items(), source="here")
    with pytest.raises(ModelError, match=r"here: tensor model\.layers\.0\.self_attn\.o_proj\.weight is missing"):
        decoder.hand_over(lambda index, layer: seen.append(index), lambda head: seen.append("head"))
    assert seen == ["head", 1]


@pytest.mark.parametrize("cuts", [[], [1, 140], [299]])
def test_logits_behind_every_token(cuts):
    """Those of the prompt fed token by token, beside a row that nobody asks about."""
    decoder = random_decoder(layer_windows=(None, 70, None))
    prompt = torch.randint(97, (300,), generator=torch.Generator().manual_seed(0)).tolist()

    def made():
        return Rows(decoder, decoder.config, torch.float32)

    single, rows, found = made(), made(), []
    expected = torch.stack([single.feed({0: [token]})[0] for token in prompt])
    for begin, end in zip([0, *cuts], [*cuts, 300], strict=True):
        last, scored = rows.feed_scored({1: [5, 6], 0: prompt[begin:end]}, {0: end - begin})
        found.append(scored[0])
        torch.testing.assert_close(last[1], expected[end - 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows.feed({0: [3]})[0], single.feed({0: [3]})[0], rtol=1e-4, atol=1e-4)

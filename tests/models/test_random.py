"""Random models."""

import pytest
import torch

from aphoton.errors import ModelError
from aphoton.models import Decoder, find_checkpoint, random_checkpoint
from aphoton.models.decoder import tensor_shapes


def weights(name):
    return dict(random_checkpoint(name).weights())


def test_the_same_seed_gives_the_same_weights():
    first, again, other = weights("random:tiny"), weights("random:tiny:0"), weights("random:tiny:1")
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].ndim == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert len({first[name].sum().item() for name in matrices}) == len(matrices)


def test_greedy_outputs_depend_on_the_prompt(rows):
    checkpoint = random_checkpoint("random:tiny")
    run = rows(Decoder.load(checkpoint.config, checkpoint.weights()))
    outputs = {}
    fed = {str(prompt): [prompt, prompt + 1] for prompt in range(0, 80, 10)}
    for _ in range(20):
        fed = {name: [int(logits.argmax())] for name, logits in run.feed(fed).items()}
        for name, (token,) in fed.items():
            outputs.setdefault(name, []).append(token)
    assert len({tuple(output) for output in outputs.values()}) == 8
    assert min(len(set(output)) for output in outputs.values()) > 2


@pytest.mark.parametrize(("name", "millions"), [("135m", 135), ("1b", 1236), ("8b", 8030)])
def test_sizes(name, millions):
    shapes = tensor_shapes(random_checkpoint(f"random:{name}").config).values()
    assert sum(torch.Size(shape).numel() for shape in shapes) // 10**6 == pytest.approx(millions, abs=1)


def test_it_brings_no_text():
    checkpoint = find_checkpoint("random:tiny:3")
    assert checkpoint.tokenizer() is None
    assert checkpoint.chat_template is None
    assert checkpoint.config.eos_token_ids == ()


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "random:huge",
        "random:",
        "random:tiny:x",
        "random:tiny:-1",
        pytest.param("random:tiny:" + "9" * 5000, id="long"),
    ],
)
def test_unknown_names(name):
    with pytest.raises(ModelError, match=f"^{name}: no such random model, expected one of random:tiny, random:135m"):
        random_checkpoint(name)

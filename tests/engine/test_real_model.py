"""SmolLM2: token for token what `transformers` gives from the same weights."""

import asyncio
import functools
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from engine.prompts import PROMPTS, TOKENS
from engine.waiting import idle
from onethread import one_torch_thread

from aphoton import Completion, Engine
from aphoton.kernels import native_available
from aphoton.models import open_checkpoint

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Not here: the native kernels may have all there are."""


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> transformers.LlamaForCausalLM:
    """Theirs, with the weights that our checkpoint dequantizes."""
    checkpoint = open_checkpoint(smollm2)
    config = checkpoint.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_model_len,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            eos_token_id=2,
            pad_token_id=2,
        )
    )
    weights = dict(checkpoint.weights())
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    return model.eval()


async def together(model: Path, prompts: list[str], **settings: Any) -> list[tuple[list[int], Completion]]:
    """Each prompt's tokens, and its completion: all sent at once."""
    async with Engine(model, dtype="float32", max_rows=len(prompts), **settings) as engine:
        ids = [await engine.tokenize(prompt) for prompt in prompts]
        done = await asyncio.gather(*(engine.generate(prompt, max_tokens=TOKENS) for prompt in prompts))
        await idle(engine)
    assert [one.usage.prompt_tokens for one in done] == [len(prompt) for prompt in ids]
    return list(zip(ids, done, strict=True))


@one_torch_thread()
@torch.inference_mode()
def assert_greedy(model: transformers.LlamaForCausalLM, prompt: list[int], done: Completion) -> None:
    """What `transformers` would have chosen behind the prompt, and behind each of our tokens, is our next token.

    By induction this is its own greedy output, computed in one forward instead of 64 (which this machine makes 9 of
    in a second); up to the rounding of its KV cache, for which `test_one_at_a_time` runs its `generate` itself.
    """
    tokens = list(done.token_ids)
    logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
    assert logits.argmax(dim=1).tolist() == tokens
    assert done.finish_reason == ("stop" if tokens[-1] == 2 else "length")
    assert 2 not in tokens[:-1] and (len(tokens) == TOKENS or tokens[-1] == 2)


@functools.cache
def run(model: Path, kernels: Literal["native", "torch"], depth: Literal[1, 2]) -> list[tuple[list[int], Completion]]:
    if kernels == "native":
        return asyncio.run(together(model, PROMPTS, kernels=kernels, pipeline_depth=depth))
    with one_torch_thread():
        return asyncio.run(together(model, PROMPTS[1::7], kernels=kernels, pipeline_depth=depth))


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Literal["native", "torch"]:
    if request.param == "native" and native_available() is not None:
        pytest.skip(str(native_available()))
    return request.param


def test_together(smollm2: Path, reference: transformers.LlamaForCausalLM, kernels: Literal["native", "torch"]) -> None:
    results = run(smollm2, kernels, 2)
    assert 900 <= max(len(prompt) for prompt, _ in results) <= 1100 or kernels == "torch"
    for prompt, done in results:
        assert_greedy(reference, prompt, done)
    if kernels == "native":
        for (_, deep), (_, flat) in zip(results, run(smollm2, kernels, 1), strict=True):
            assert deep.outputs == flat.outputs, "at either depth"


@one_torch_thread()
@torch.inference_mode()
def test_one_at_a_time(
    smollm2: Path, reference: transformers.LlamaForCausalLM, kernels: Literal["native", "torch"]
) -> None:
    results = run(smollm2, kernels, 2)
    for prompt, done in results[:1] if kernels == "torch" else (results[number] for number in (0, 3, 18)):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=2,
        )
        assert theirs[0, len(prompt) :].tolist() == list(done.token_ids)


async def test_a_conversation(smollm2: Path) -> None:
    """In the fastest type, streamed: an answer that makes sense, through the model's own template."""
    async with Engine(smollm2, max_rows=2) as engine:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        stream = engine.chat_stream(question, max_tokens=64)
        answer = "".join([piece.text async for piece in stream])
        assert "Paris" in answer and "<|im_" not in answer
        done = await stream.completion()
        assert (done.text, done.finish_reason) == (answer, "stop")
        more = [*question, {"role": "assistant", "content": answer}, {"role": "user", "content": "And of Italy?"}]
        done = await engine.chat(more, max_tokens=64)
        assert "Rome" in done.text
        text = "日本の首都 🙂 <|im_start|>"
        assert await engine.detokenize(await engine.tokenize(text)) == "日本の首都 🙂 "

"""What a request gives back of its prompt: echo, log-probabilities, and max_tokens = 0."""

import asyncio
from typing import Any, Literal

import pytest
import torch
from engine.machines import Counting, machine
from engine.waiting import idle

from aphoton import Completion, Engine, InvalidRequest, Piece, PromptTooLong, SimModel, TokenLogprob
from aphoton.attention import KVCache
from aphoton.models import Decoder, StepInput, random_checkpoint
from aphoton.observe import Span

PROMPT = [(7 * i + 11) % 512 for i in range(40)]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    checkpoint = random_checkpoint("random:tiny")
    return Decoder.load(checkpoint.config, checkpoint.weights(), dtype=torch.float32, source="random:tiny")


@torch.inference_mode()
def direct(decoder: Decoder, prompt: list[int], top: int) -> list[TokenLogprob]:
    """The model by itself: for each token but the first, a forward of those before it."""
    config = decoder.config
    entries = []
    for count in range(1, len(prompt)):
        kv = KVCache(
            layers=config.num_layers,
            pages=5,
            page_size=16,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
        )
        starts, lengths = torch.zeros(1, dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
        step = StepInput(
            tokens=torch.tensor(prompt[:count]),
            starts=starts,
            lengths=lengths,
            tables=torch.arange(1, 5, dtype=torch.int32)[None],
            host_starts=starts.numpy(),
            host_lengths=lengths.numpy(),
        )
        row = decoder.forward(step, kv)[0].log_softmax(dim=0)
        best = row.topk(top)
        entries.append(
            TokenLogprob(
                token_id=prompt[count],
                logprob=float(row[prompt[count]]),
                top=tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
            )
        )
    return entries


def check(entries: tuple[TokenLogprob | None, ...] | None, expected: list[TokenLogprob], top: int) -> None:
    assert entries is not None and entries[0] is None and len(entries) == len(expected) + 1
    for entry, other in zip(entries[1:], expected, strict=True):
        assert entry is not None
        assert entry.token_id == other.token_id
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in other.top[:top]], abs=1e-3)


async def both(engine: Engine, prompt: Any, **sampling: Any) -> Completion:
    """`generate`, and the same streamed, which must agree."""
    done = await engine.generate(prompt, **sampling)
    pieces: list[Piece] = [piece async for piece in engine.stream(prompt, **sampling)]
    for output in done.outputs:
        own = [piece for piece in pieces if piece.index == output.index]
        assert "".join(piece.text for piece in own) == output.text
        assert tuple(token for piece in own for token in piece.token_ids) == output.token_ids
        if output.logprobs is None:
            assert all(piece.logprobs is None for piece in own)
        else:
            joined = [entry for piece in own for entry in piece.logprobs or ()]
            assert [entry and entry.token_id for entry in joined] == [
                entry and entry.token_id for entry in output.logprobs
            ]
    told = [piece for piece in pieces if piece.prompt_logprobs is not None]
    assert len(told) == (done.prompt_logprobs is not None)
    if told:
        assert told[0] is next(piece for piece in pieces if piece.index == 0)
        assert [e and e.token_id for e in told[0].prompt_logprobs or ()] == [None, *_ids(prompt)[1:]]
    return done


def _ids(prompt: Any) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [7, 2048])
async def test_logprobs_of_the_prompt_are_the_models(decoder: Decoder, budget: int, depth: Literal[1, 2]) -> None:
    """However it is computed: in parts, beside others, with a prefix in the cache, and for any number."""
    expected = direct(decoder, PROMPT, 64)
    async with Engine(
        "random:tiny", dtype="float32", pipeline_depth=depth, max_step_tokens=budget, max_rows=4
    ) as engine:
        plain = await engine.generate(PROMPT, max_tokens=4)
        asked: list[dict[str, Any]] = [
            {"prompt_logprobs": 3, "max_tokens": 4},
            {"prompt_logprobs": 0, "max_tokens": 0},
            {"prompt_logprobs": 64, "max_tokens": 1, "temperature": 1.0, "seed": 1},
            {"prompt_logprobs": 2, "max_tokens": 4, "n": 3},
            {"prompt_logprobs": 1, "max_tokens": 4, "logit_bias": {5: 100}, "repetition_penalty": 2.0},
        ]
        for sampling in asked:
            check((await both(engine, PROMPT, **sampling)).prompt_logprobs, expected, sampling["prompt_logprobs"])
        together = await asyncio.gather(*(engine.generate(PROMPT, **sampling) for sampling in asked))
        for sampling, done in zip(asked, together, strict=True):
            check(done.prompt_logprobs, expected, sampling["prompt_logprobs"])
        assert together[0].token_ids == plain.token_ids, "asking changes no token"
        assert plain.prompt_logprobs is None
        await idle(engine)


async def test_a_prompt_of_one_token_has_nothing_before_it(tiny: Engine) -> None:
    assert (await both(tiny, [5], prompt_logprobs=2, max_tokens=2)).prompt_logprobs == (None,)
    assert (await both(tiny, [5], prompt_logprobs=2, max_tokens=0)).prompt_logprobs == (None,)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
async def test_echo(tiny: Engine, max_tokens: int, n: int) -> None:
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "n": n, "temperature": 1.0, "seed": 3}
    plain = await tiny.generate("Hello", **sampling)
    done = await both(tiny, "Hello", echo=True, **sampling)
    for output, bare in zip(done.outputs, plain.outputs, strict=True):
        assert output.text == "Hello" + bare.text
        assert output.token_ids == (*b"Hello", *bare.token_ids)
        assert (output.finish_reason, output.logprobs) == (bare.finish_reason, None)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, n * max_tokens)


@pytest.mark.parametrize("n", [1, 3])
async def test_echo_with_logprobs(decoder: Decoder, n: int) -> None:
    expected = direct(decoder, PROMPT, 64)
    async with Engine("random:tiny", dtype="float32", max_rows=2, max_step_tokens=16) as engine:
        done = await both(engine, PROMPT, echo=True, logprobs=3, max_tokens=5, n=n)
        plain = await engine.generate(PROMPT, logprobs=3, max_tokens=5, n=n)
        for output, bare in zip(done.outputs, plain.outputs, strict=True):
            assert output.logprobs is not None and bare.logprobs is not None
            check(output.logprobs[: len(PROMPT)], expected, 3)
            assert [e and e.token_id for e in output.logprobs[len(PROMPT) :]] == list(bare.token_ids)
            assert all(entry is None or len(entry.top) == 3 for entry in output.logprobs)
        for fewer, more in ((1, 4), (4, 1), (0, 2)):
            done = await both(engine, PROMPT, echo=True, logprobs=fewer, prompt_logprobs=more, max_tokens=2)
            assert done.logprobs is not None
            check(done.logprobs[: len(PROMPT)], expected, fewer)
            check(done.prompt_logprobs, expected, more)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_an_echoed_prompt_is_scored_once_and_told_with_each_output(tiny: Engine, max_tokens: int) -> None:
    """Also with those whose tokens come before it is scored: the cache has their prompt."""
    assert tiny._scheduler is not None
    score, scored, fed = tiny._scheduler._score, 0, 0

    def counted(step: Any, *args: Any) -> None:
        nonlocal scored
        scored += sum(len(one.targets) for one in step.batch.scored)
        score(step, *args)

    def count(span: Span) -> None:
        nonlocal fed
        fed += span.tokens if span.phase == "launch" else 0

    prompt = [(7 * i + 11) % 512 for i in range(700)]
    alone = await tiny.generate(prompt, echo=True, logprobs=2, max_tokens=max_tokens)
    tiny._scheduler._score = counted  # type: ignore[method-assign]
    tiny.timeline.on_span = count
    pieces = [piece async for piece in tiny.stream(prompt, n=4, echo=True, logprobs=2, max_tokens=max_tokens)]
    assert scored == 699
    assert fed < 700 + 3 * (16 + max_tokens) + max_tokens
    assert alone.logprobs is not None
    for index in range(4):
        first = next(piece for piece in pieces if piece.index == index)
        assert first.logprobs is not None and first.logprobs[:700] == alone.logprobs[:700]
    await idle(tiny)


async def test_echo_of_ids_and_with_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(monkeypatch, Counting()) as engine:
        done = await both(engine, list(b"xyz"), echo=True, stop="}", max_tokens=9)
        assert (done.text, done.outputs[0].stop_reason) == ("xyz{|", "}")
        done = await both(engine, list(b"stop"), echo=True, stop="stop", max_tokens=3)
        assert (done.text, done.finish_reason) == ("stopqrs", "length"), "the prompt is not searched"
        done = await both(engine, "ü", echo=True, max_tokens=0)
        assert done.text == "ü"


async def test_echo_of_one_that_is_given_up_at_once(tiny: Engine) -> None:
    stream = tiny.stream("Hello", echo=True, logprobs=1, prompt_logprobs=1)
    async with stream:
        pass
    done = await stream.completion()
    assert (done.text, done.finish_reason) == ("Hello", "abort")
    assert done.logprobs == (None,) * 5 == done.prompt_logprobs, "nothing is known of them"
    await idle(tiny)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("device", ["sim", "cpu"])
async def test_no_tokens_at_all(device: str, depth: Literal[1, 2]) -> None:
    async with Engine(SimModel() if device == "sim" else "random:tiny", pipeline_depth=depth, max_rows=2) as engine:
        done = await both(engine, [1, 2, 3], max_tokens=0)
        assert (done.text, done.token_ids, done.finish_reason) == ("", (), "length")
        assert done.outputs[0].stop_reason is None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 0)
        assert done.timings.ttft is None and done.timings.itl is None
        crowd = await asyncio.gather(*(engine.generate([5], max_tokens=number % 3, n=2) for number in range(12)))
        assert [len(one.token_ids) for one in crowd] == [number % 3 for number in range(12)] or device == "sim"
        await idle(engine)


async def test_the_longest_prompt_leaves_no_room_but_for_itself() -> None:
    async with Engine("random:tiny", max_model_len=20) as engine:
        done = await engine.generate([1] * 20, max_tokens=0, prompt_logprobs=0)
        assert done.prompt_logprobs is not None and len(done.prompt_logprobs) == 20
        for length, max_tokens in ((21, 0), (20, 1), (20, None)):
            with pytest.raises(PromptTooLong):
                await engine.generate([1] * length, max_tokens=max_tokens)
        await idle(engine)


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 0}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("presence_penalty", {"presence_penalty": 1.0}),
        ("frequency_penalty", {"frequency_penalty": -1.0}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("logit_bias", {"logit_bias": {1: 1.0}}),
        ("processor", {"processor": lambda output, logits: None}),
    ],
)
async def test_what_means_nothing_on_the_simulated_device(field: str, sampling: dict[str, Any]) -> None:
    async with Engine(SimModel()) as engine:
        with pytest.raises(InvalidRequest, match="means nothing on the simulated device") as refused:
            await engine.generate([1], **sampling)
        assert refused.value.field == field
        assert (await engine.generate([1], echo=True, max_tokens=0)).token_ids == (1,)

"""Random mixtures of all that requests can ask, in engines of any setting: each gets what it would get by itself."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from engine.waiting import idle, until
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aphoton import AphotonError, Completion, Engine

LONGEST = 60 + 12 + 30
STEMS = [[(7 * place + 31 * number) % 390 + 5 for place in range(60)] for number in range(3)]
TIGHT: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "seed": 1}

Ask = tuple[list[int], dict[str, Any], int | None]
"""A prompt, what is asked for, and after how many steps it is given up."""


def damp(output: Sequence[int], logits: Tensor) -> None:
    """A processor that looks at what has been sampled."""
    logits[len(output) % 50 :: 7] -= 2.0


def fail_at_the_fifth(output: Sequence[int], logits: Tensor) -> None:
    """A processor that raises in the midst."""
    if len(output) == 4:
        raise KeyError("the fifth")
    logits.mul_(0.5)


ids = st.integers(0, 399)
rules = st.one_of(
    st.just({}),
    st.sampled_from(["[0-9]{3,8}", "(ab|cd)+", "[a-z ]{1,30}", "a{5}"]).map(lambda regex: {"regex": regex}),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"enum": ["x", "yy", 3]},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ]
    ).map(lambda schema: {"json_schema": schema}),
    st.sampled_from([["yes", "no"], ["a", "ab", "abc"], ["é", "日本"]]).map(lambda choices: {"choices": choices}),
    st.sampled_from(['start: "a" b\nb: /[0-9]/+', 'start: ("x"|"yy")+ "z"']).map(lambda text: {"grammar": text}),
    st.just({"json_object": True}),
)
wishes = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([12, 30, 5, 1, 0]), "seed": st.integers(0, 9)},
    optional={
        "temperature": st.sampled_from([0.5, 1.0, 1.5]),
        "top_k": st.sampled_from([1, 5, 50]),
        "top_p": st.sampled_from([0.1, 0.9]),
        "min_p": st.just(0.1),
        "logprobs": st.sampled_from([0, 1, 5]),
        "prompt_logprobs": st.sampled_from([0, 2]),
        "echo": st.just(True),
        "n": st.integers(2, 3),
        "presence_penalty": st.sampled_from([-2.0, 1.0]),
        "frequency_penalty": st.sampled_from([-1.0, 1.5]),
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, 100.0, 5.0]), min_size=1, max_size=3),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=40, unique=True),
        "bad_words": st.lists(st.sampled_from(["a", "ab", "é", " x", "\n"]), min_size=1, max_size=2, unique=True),
        "stop": st.lists(st.sampled_from(["a", "e", "1", "}", "xx"]), min_size=1, max_size=2, unique=True),
        "stop_token_ids": st.lists(ids, min_size=1, max_size=3, unique=True),
        "include_stop_str_in_output": st.just(True),
        "ignore_eos": st.just(True),
        "processor": st.sampled_from([damp, damp, fail_at_the_fifth]),
        "priority": st.integers(-2, 2),
        "use_prefix_cache": st.booleans(),
    },
)
prompts = st.tuples(
    st.sampled_from(STEMS), st.integers(0, 60), st.lists(st.integers(5, 399), min_size=1, max_size=12)
).map(lambda parts: parts[0][: parts[1]] + parts[2])
asks = st.tuples(prompts, st.tuples(wishes, rules).map(lambda both: both[0] | both[1]), st.none() | st.integers(0, 40))
engines = st.fixed_dictionaries(
    {
        "pipeline_depth": st.sampled_from([1, 2]),
        "prefix_cache": st.booleans(),
        "max_rows": st.sampled_from([4, 2, 16]),
        "page_size": st.sampled_from([1, 4, 16]),
        "max_step_tokens": st.sampled_from([1, 7, 32, 2048]),
        "max_waiting": st.sampled_from([0, 2, 1000]),
        "spare": st.sampled_from([0.1, 0.0, 1.0]),
    }
)

CROWDED: tuple[list[Ask], dict[str, Any]] = (
    [([5 + seed], {"max_tokens": 30, "seed": seed, "temperature": 1.0, "ignore_eos": True}, None) for seed in range(6)],
    {
        "pipeline_depth": 2,
        "prefix_cache": True,
        "max_rows": 16,
        "page_size": 1,
        "max_step_tokens": 32,
        "max_waiting": 1000,
        "spare": 0.0,
    },
)
"""Too many for the pages there are."""


def told(done: Completion) -> Any:
    """All of it that may not depend on others; log-probabilities to three digits, for sums have an order."""

    def close(logprobs: Any) -> Any:
        if logprobs is None:
            return None
        return [None if one is None else (one.token_id, pytest.approx(one.logprob, abs=3e-3)) for one in logprobs]

    outputs = []
    for one in done.outputs:
        try:
            parsed = one.parsed
        except ValueError as error:
            parsed = type(error)
        outputs.append((one.token_ids, one.text, one.finish_reason, one.stop_reason, parsed, close(one.logprobs)))
    return outputs, close(done.prompt_logprobs), done.usage.prompt_tokens, done.usage.completion_tokens


async def result(engine: Engine, prompt: list[int], sampling: dict[str, Any]) -> Any:
    """What `told` says, or of what kind the error is: ours, or a processor's own."""
    try:
        return told(await engine.generate(prompt, **sampling))
    except (AphotonError, KeyError) as error:
        return type(error), getattr(error, "field", None), str(error)


async def crowd(wanted: list[Ask], config: dict[str, Any]) -> tuple[list[Any], int]:
    """Results of those who stay, None of the others; and the preemptions."""
    spare = config.pop("spare")
    least = -(-LONGEST // config["page_size"])
    pages = least + 1 + int(spare * least)
    async with Engine("random:tiny", kv_pages=pages, **{**TIGHT, **config}) as engine:
        tasks = [asyncio.create_task(result(engine, prompt, sampling)) for prompt, sampling, _ in wanted]

        async def give_up(task: asyncio.Task[Any], steps: int) -> None:
            await until(lambda: task.done() or engine.stats().steps >= steps or all(one.done() for one in staying))
            task.cancel()

        staying = [task for task, (_, _, leave) in zip(tasks, wanted, strict=True) if leave is None]
        leaving = [(task, leave) for task, (_, _, leave) in zip(tasks, wanted, strict=True) if leave is not None]
        await asyncio.gather(*staying, *(give_up(task, steps) for task, steps in leaving))
        await asyncio.gather(*(task for task, _ in leaving), return_exceptions=True)
        await idle(engine)
        preemptions = engine.stats().preemptions
    return [task.result() if task in staying else None for task in tasks], preemptions


@pytest.mark.timeout(900)
def test_each_gets_what_it_would_get_by_itself() -> None:
    preemptions = 0
    reference = Engine("random:tiny", pipeline_depth=1, prefix_cache=False, max_rows=4, **TIGHT)
    with asyncio.Runner() as runner:
        runner.run(reference.start())

        @example(*CROWDED)
        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(asks, min_size=6, max_size=16), engines)
        def check(wanted: list[Ask], config: dict[str, Any]) -> None:
            nonlocal preemptions
            found, count = runner.run(crowd(wanted, dict(config)))
            preemptions += count
            for (prompt, sampling, _), one in zip(wanted, found, strict=True):
                if one is not None:
                    assert one == runner.run(result(reference, prompt, sampling)), sampling

        check()
        runner.run(reference.aclose())
    assert preemptions > 0, "pages have run out"

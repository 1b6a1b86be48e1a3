"""Spans of OpenTelemetry's, as its own SDK sees them."""

import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from engine.waiting import idle, until
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sayer import END_OF_PROMPT
from serving import Served

from aphoton_serve import tracing

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TTFT = "gen_ai.server.time_to_first_token"
TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = {"traceparent": f"00-{TRACE:032x}-{SPAN:016x}-01", "tracestate": "vendor=1"}


@pytest.fixture
async def spans(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "TRACER", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    spans.clear()
    return span


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation(hello: Served, spans: InMemorySpanExporter, stream: bool) -> None:
    ask: dict[str, Any] = {"model": "hello", "messages": HI, "max_tokens": 90, "temperature": 0.5, "stop": ["wö", "x"]}
    done = await hello.ai.chat.completions.create(**ask, stream=stream, extra_headers=PARENT)
    if stream:
        assert [chunk async for chunk in done]
    span = only(spans)
    assert span.name == "chat hello" and span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
    assert span.context is not None and span.parent is not None and span.parent.is_remote
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, SPAN)
    assert span.context.trace_state.get("vendor") == "1"
    prompt = await hello.engine("hello").chat(HI, max_tokens=1)
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aphoton",
        "gen_ai.request.model": "hello",
        "gen_ai.request.max_tokens": 90,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.stop_sequences": ("wö", "x"),
        "gen_ai.response.model": "hello",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": prompt.usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": len("Hello, wö".encode()),
    }
    (event,) = span.events
    assert event.name == TTFT and event.attributes is not None and span.start_time is not None
    seconds = event.attributes[TTFT]
    assert isinstance(seconds, float) and seconds > 0
    assert event.timestamp == span.start_time + round(seconds * 1e9)


async def test_a_span_for_each_prompt(hello: Served, spans: InMemorySpanExporter) -> None:
    ask: dict[str, Any] = {"model": "hello", "prompt": [END_OF_PROMPT, f"a{END_OF_PROMPT}"], "n": 2, "max_tokens": 4}
    await hello.ai.completions.create(**ask)
    found = spans.get_finished_spans()
    assert [span.name for span in found] == ["text_completion hello"] * 2
    assert all(span.parent is None for span in found)
    told = [dict(span.attributes or {}) for span in found]
    assert sorted(one["gen_ai.usage.input_tokens"] for one in told) == [1, 2]  # type: ignore[type-var]
    assert all(one["gen_ai.response.finish_reasons"] == ("length", "length") for one in told)
    assert all(one["gen_ai.request.choice.count"] == 2 for one in told)


async def test_what_fails_says_so(hello: Served, spans: InMemorySpanExporter) -> None:
    with pytest.raises(openai.BadRequestError):
        await hello.ai.completions.create(model="hello", prompt="x" * 200_000)
    span = only(spans)
    assert span.status.status_code is StatusCode.ERROR and (span.attributes or {})["error.type"] == "PromptTooLong"
    wrong: Any = {"role": "assistant", "content": None, "tool_calls": [{"function": 1}]}
    with pytest.raises(openai.BadRequestError):
        await hello.ai.chat.completions.create(model="hello", messages=[*HI, wrong])
    assert (only(spans).attributes or {})["error.type"] == "InvalidRequest"


async def test_a_client_that_goes(hello: Served, spans: InMemorySpanExporter) -> None:
    stream = await hello.ai.chat.completions.create(model="endless", messages=HI, stream=True)
    await anext(stream)
    assert not spans.get_finished_spans()
    await stream.close()
    await until(spans.get_finished_spans)
    told = only(spans).attributes or {}
    assert told.get("gen_ai.response.finish_reasons") == ("abort",) or told.get("error.type") == "abort"
    await idle(hello.engine("endless"))


async def test_nobody_traces(hello: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, and with it alone."""
    for _ in range(2):
        done = await hello.ai.chat.completions.create(model="hello", messages=HI, extra_headers=PARENT)
        assert done.choices[0].message.content == "Hello, wörld!"
        with pytest.raises(openai.BadRequestError):
            await hello.ai.completions.create(model="hello", prompt="x" * 200_000)
        monkeypatch.setattr(tracing, "TRACER", None)
    assert tracing.trace_of(PARENT) is None


def test_without_the_package_nothing_is_imported() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None; import aphoton_serve.service, aphoton_serve.local, "
        "aphoton_serve.tracing as t; assert t.TRACER is None; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

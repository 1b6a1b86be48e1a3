"""The stream as bytes, and the metrics as text."""

import json

from prometheus_client.parser import text_string_to_metric_families
from serving import Served

HI = [{"role": "user", "content": "Hi"}]


async def test_framing(hello: Served) -> None:
    ask = {"model": "hello", "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    async with hello.web.stream("POST", "/v1/chat/completions", json=ask) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-store"
        assert "content-length" not in response.headers
        body = await response.aread()
    events = body.decode().split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    chunks = [json.loads(event[6:]) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
    assert chunks[0]["choices"] == [first]
    assert chunks[-2]["choices"][0]["delta"] == {} and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 15 and chunks[-1]["choices"] == []
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "Hello, wörld!"


async def test_an_error_before_the_first_event_is_no_stream(hello: Served) -> None:
    ask = {"model": "hello", "messages": HI, "stream": True, "stop_token_ids": [5000]}
    response = await hello.web.post("/v1/chat/completions", json=ask)
    assert response.status_code == 400 and response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == "stop_token_ids"


async def test_an_error_in_the_midst_is_an_event(hello: Served) -> None:
    ask = {"model": "endless", "messages": HI, "stream": True, "max_tokens": 900_000}
    headers = {"x-request-timeout": "0.3"}
    response = await hello.web.post("/v1/chat/completions", json=ask, headers=headers)
    assert response.status_code == 200
    *_, last, end = response.text.split("\n\n")
    assert end == "" and last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "timeout"
    assert "[DONE]" not in response.text


async def test_metrics(hello: Served) -> None:
    await hello.ai.chat.completions.create(model="hello", messages=HI)  # type: ignore[arg-type]
    await hello.ai.chat.completions.create(model="hello", messages=HI, max_tokens=3)  # type: ignore[arg-type]
    response = await hello.web.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["aphoton_requests_total", "hello", "stop"] == 1
    assert samples["aphoton_requests_total", "hello", "length"] == 1
    assert samples["aphoton_generated_tokens_total", "hello"] == 15 + 3
    assert samples["aphoton_prompt_tokens_total", "hello"] == 2 * len("user: Hi\n\x02")
    for name in ("time_to_first_token_seconds", "queue_seconds", "inter_token_seconds"):
        assert samples[f"aphoton_{name}_count", "hello"] == 2
        assert samples[f"aphoton_{name}_sum", "hello"] >= 0
    assert samples["aphoton_requests_running", "hello"] == samples["aphoton_requests_waiting", "hello"] == 0
    assert samples["aphoton_kv_use_ratio", "hello"] == samples["aphoton_zombies", "hello"] == 0
    pages = [samples["aphoton_kv_pages", *sorted(("hello", state))] for state in ("free", "cached", "used")]
    assert sum(pages) == 300_000 and pages[2] == 0
    assert samples["aphoton_engine_up", "endless"] == 1
    assert samples["aphoton_steps_total", "hello"] > 15
    assert 0 <= samples["aphoton_device_idle_ratio", "hello"] < 1
    assert ("aphoton_zombie_rows_total", "hello") in samples

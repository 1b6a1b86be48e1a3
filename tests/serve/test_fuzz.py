"""Random requests: whatever they say, the server does not fail."""

import json
import random
from typing import Any

import pytest
from engine.waiting import idle
from serving import Served

from aphoton_serve.protocol_requests import ChatRequest, CompletionRequest

HI = [{"role": "user", "content": "Hi"}]
BASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"model": "hello", "messages": HI, "max_tokens": 4}),
    "/v1/completions": (CompletionRequest, {"model": "hello", "prompt": "\x02", "max_tokens": 4}),
}
ATOMS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 20, 64, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.0, -0.0, 0.5, 1.0, 1.5, 1e308,
    -1e308, 5e-324, "", "a", "Hi", "\x00", "\x02", "é\u0301", "\U0001f600", "x" * 5000, "{{ x }}", "../..", "sys.exit",
    "auto", "none", "required", "user", "assistant", "tool", "system", "text", "json_object", "json_schema", "function",
]  # fmt: skip
KEYS = [
    "role", "content", "type", "text", "name", "function", "arguments", "parameters", "tool_calls", "json_schema",
    "schema", "include_usage", "1", "x", "",
]  # fmt: skip


def value(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.55:
        return rng.choice(ATOMS)
    if kind < 0.75:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def mutated(rng: random.Random, body: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    changed = dict(body)
    for _ in range(rng.choice([1, 1, 2, 3])):
        changed[rng.choice([*fields, "unknown"])] = value(rng, 4)
    return changed


@pytest.mark.parametrize("path", BASES)
async def test_random_fields(hello: Served, path: str) -> None:
    rng = random.Random(7)
    kind, base = BASES[path]
    seen = set()
    for _ in range(400):
        body = mutated(rng, base, kind.__struct_fields__)
        text = json.dumps(body)
        response = await hello.web.post(path, content=text, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 404, 429), (response.status_code, response.text, text)
        seen.add(response.status_code)
        if response.status_code != 200:
            assert response.json()["error"]["message"]
    assert {200, 400} <= seen
    await idle(hello.engine("hello"))


async def test_bytes_that_are_cut_or_changed(hello: Served) -> None:
    rng = random.Random(8)
    for path, (_, base) in BASES.items():
        whole = json.dumps({**base, "stop": ["a", "b"], "temperature": 0.5, "user": "é"}).encode()
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            cut = bytes(data[: rng.randrange(len(data) + 1)]) if rng.random() < 0.3 else bytes(data)
            response = await hello.web.post(path, content=cut, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404, 429), (response.status_code, response.text, cut)

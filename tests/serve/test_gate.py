"""API keys, limits, host names, logs, and what a browser may do."""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from sayer import saying
from serving import Served, serving

from aphoton import InvalidRequest
from aphoton_serve.errors import ApiError
from aphoton_serve.keys import KeyRing, read_keys
from aphoton_serve.limiter import Limiter
from aphoton_serve.local import LocalBackend
from aphoton_serve.settings import ServiceSettings

SECRET, OTHER = "sk-very-secret", "sk-another-one"
HI: list[Any] = [{"role": "user", "content": "my private words"}]


def backend() -> LocalBackend:
    return LocalBackend({"m": saying("Hello!")}, kv_pages=10_000)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_ring_of_keys() -> None:
    hashed = hashlib.sha256(OTHER.encode()).hexdigest()
    ring = KeyRing([f"me={SECRET}", f"sha256:{hashed}"])
    assert len(ring) == 2
    assert (ring.name_of(SECRET), ring.name_of(OTHER)) == ("me", "key-2")
    assert ring.name_of("") is ring.name_of(SECRET + "x") is ring.name_of(hashed) is ring.name_of("\udcff") is None
    assert SECRET not in repr(vars(ring))


@pytest.mark.parametrize("entries", [["short"], [""], ["a=b=c d"], ["sha256:12", "x"], [f"a={SECRET}", f"a={OTHER}"]])
def test_what_is_no_key(entries: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="entry") as refused:
        KeyRing(entries)
    assert SECRET not in str(refused.value)


def test_keys_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(read_keys()) == 0
    file = tmp_path / "keys"
    file.write_text(f"# people\n\nme={SECRET}  # mine\n")
    assert read_keys(file).name_of(SECRET) == "me"
    monkeypatch.setenv("APHOTON_API_KEYS", f"{OTHER}, you=sk-third-key")
    ring = read_keys(file)
    assert [ring.name_of(key) for key in (SECRET, OTHER, "sk-third-key")] == ["me", "key-1", "you"]
    file.write_text("# nobody\n")
    with pytest.raises(InvalidRequest, match="holds no key"):
        read_keys(file)


def test_limits() -> None:
    time = 0.0
    limiter = Limiter(concurrent=2, per_minute=60, now=lambda: time)
    with limiter.hold("a"), limiter.hold("a"), limiter.hold("b"):
        with pytest.raises(ApiError, match="2 requests running") as many, limiter.hold("a"):
            pass
        assert many.value.problem.status == 429 and many.value.problem.retry_after == 1
    for _ in range(58):
        with limiter.hold("a"):
            pass
    with pytest.raises(ApiError, match="60 requests a minute") as fast, limiter.hold("a"):
        pass
    assert fast.value.problem.retry_after == 1
    with limiter.hold("b"):
        pass
    time += 1.0
    with limiter.hold("a"):
        pass
    with pytest.raises(ApiError), limiter.hold("a"):
        pass


async def test_keys_open_the_service(sims: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(backend(), keys=KeyRing([f"me={SECRET}"]), key=SECRET) as served:
        done = await served.ai.chat.completions.create(model="m", messages=HI)
        assert done.choices[0].message.content == "Hello!"
        wrong = served.ai.with_options(api_key=OTHER)
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            await wrong.chat.completions.create(model="m", messages=HI)
        for path in ("/v1/models", "/v1/models/m", "/metrics", "/ticks?model=m", "/nothing"):
            response = await served.web.get(path)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            for bad in (
                {"authorization": SECRET},
                {"authorization": f"Basic {SECRET}"},
                {"authorization": "Bearer"},
                bearer(OTHER),
            ):
                assert (await served.web.get(path, headers=bad)).status_code == 401
        assert (await served.web.get("/v1/models", headers=bearer(SECRET))).status_code == 200
        assert (await served.web.get("/metrics", headers=bearer(SECRET))).status_code == 200
        assert (await served.web.get("/health")).status_code == 200
        assert (await served.web.get("/")).status_code == 200
    ours = [record.getMessage() for record in caplog.records if record.name == "aphoton.serve"]
    assert any(re.search(r" me POST '/v1/chat/completions' 200 ", line) for line in ours)
    assert not any(word in line for line in ours for word in (SECRET, OTHER, "private words"))


async def test_limits_by_key(sims: None) -> None:
    settings = ServiceSettings(requests_per_minute=2)
    keys = KeyRing([SECRET, OTHER])
    async with serving(backend(), settings, keys, key=SECRET) as served:
        for _ in range(2):
            await served.ai.chat.completions.create(model="m", messages=HI)
        with pytest.raises(openai.RateLimitError) as many:
            await served.ai.chat.completions.create(model="m", messages=HI)
        assert int(many.value.response.headers["retry-after"]) in (29, 30)
        await served.ai.with_options(api_key=OTHER).chat.completions.create(model="m", messages=HI)
        assert (await served.web.get("/v1/models", headers=bearer(SECRET))).status_code == 200


async def test_requests_at_the_same_time(sims: None) -> None:
    models = {"endless": saying("la ", end=False, max_model_len=1_000_000)}
    async with serving(LocalBackend(models, kv_pages=100_000), ServiceSettings(concurrency_per_key=1)) as served:
        ask: dict[str, Any] = {"model": "endless", "messages": HI, "max_tokens": 900_000, "stream": True}
        async with await served.ai.chat.completions.create(**ask) as stream:
            await anext(stream)
            with pytest.raises(openai.RateLimitError, match="1 requests running"):
                await served.ai.chat.completions.create(**ask)
        while True:  # the server has to hear that the first has gone
            try:
                async with await served.ai.chat.completions.create(**ask) as stream:
                    await anext(stream)
                break
            except openai.RateLimitError:
                pass


@pytest.mark.parametrize("said", [True, False])
async def test_a_large_body(sims: None, said: bool) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 1000

    async with serving(backend(), ServiceSettings(max_body_bytes=10_000)) as served:
        content = b"x" * 20_000 if said else chunks()
        response = await served.web.post("/tokenize", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


async def test_host_names(sims: None) -> None:
    async with serving(backend(), ServiceSettings(allowed_hosts=("127.0.0.1", "[::1]"))) as served:
        for host, status in (
            ("127.0.0.1", 200),
            ("127.0.0.1:80", 200),
            ("[::1]:80", 200),
            ("evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("", 403),
        ):
            assert (await served.web.get("/health", headers={"host": host})).status_code == status


async def test_cors(sims: None) -> None:
    preflight = {
        "origin": "https://example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    async with serving(backend(), keys=KeyRing([SECRET])) as served:
        response = await served.web.options("/v1/chat/completions", headers=preflight)
        assert response.status_code == 401
        assert not any(name.startswith("access-control") for name in response.headers)
    settings = ServiceSettings(cors_origins=("https://example.org",))
    async with serving(backend(), settings, KeyRing([SECRET])) as served:
        response = await served.web.options("/v1/chat/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://example.org"
        refused = await served.web.get("/v1/models", headers={"origin": "https://example.org"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        other = await served.web.options("/v1/models", headers={**preflight, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_request_ids(hello: Served) -> None:
    for given, kept in (("abc-123", True), ("a b", False), ("x" * 65, False), ("<script>", False)):
        response = await hello.web.get("/health", headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is kept
        assert re.fullmatch(r"[A-Za-z0-9-]{1,64}", response.headers["x-request-id"])


async def test_a_log_line_is_one_line(hello: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aphoton.serve")
    await hello.web.get("/a%0A2026 forged")
    (line,) = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert "\n" not in line and " 404 " in line


async def test_the_page(hello: Served) -> None:
    response = await hello.web.get("/")
    page = response.text
    assert response.headers["content-type"].startswith("text/html")
    assert "innerHTML" not in page and "http://" not in page and "https://" not in page and " src=" not in page
    assert not re.search(r"\son\w+=", page) and " style=" not in page
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert len(re.findall("'sha256-[^']{44}'", policy)) == 2


async def test_ticks(hello: Served) -> None:
    await hello.ai.chat.completions.create(model="hello", messages=HI)
    answer = (await hello.web.get("/ticks", params={"model": "hello"})).json()
    assert answer["tokens"] == len("Hello, wörld!".encode()) + 1
    phases = {span[0] for span in answer["spans"]}
    assert {"launch", "wait", "commit", "sample", "device"} <= phases
    assert all(begin <= end for _, _, begin, end, _, _ in answer["spans"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_bytes": 0},
        {"request_timeout": 0},
        {"request_timeout": float("nan")},
        {"concurrency_per_key": 0},
        {"requests_per_minute": 1.5},
        {"cors_origins": "https://example.org"},
        {"allowed_hosts": ("",)},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ServiceSettings(**wrong)
    assert refused.value.field in wrong

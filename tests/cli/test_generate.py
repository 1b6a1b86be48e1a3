"""``aphoton generate`` and ``aphoton pull``."""

import asyncio
import io
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cli.running import Run
from cli.terminal import CTRL_C, Terminal
from rich.console import Console

from aphoton import Completion, Engine
from aphoton.cli.terminal import FetchBar


def _direct(model: Path, prompt: str, *, dtype: str = "auto", kernels: str = "auto", **sampling: Any) -> Completion:
    async def generate() -> Completion:
        async with Engine(model, max_rows=1, dtype=dtype, kernels=kernels) as engine:
            return await engine.generate(prompt, **sampling)

    return asyncio.run(generate())


def test_writes_the_text(run: Run, talker: Path) -> None:
    expected = _direct(talker, "Once upon", max_tokens=10).text
    assert run("generate", str(talker), "Once upon", "--max-tokens", "10").stdout == f"{expected}\n"
    assert run("generate", str(talker), "-", "--max-tokens", "10", input="Once upon\n").stdout == f"{expected}\n"


def test_input_that_is_not_text(run: Run) -> None:
    result = run("generate", "random:tiny", "-", input=b"\xff\n", code=2)
    assert result.stderr.startswith("error: prompt: standard input is not text: ")


@pytest.mark.parametrize("content", ["{", "[" * 200_000], ids=["cut", "deep"])
def test_a_schema_that_is_not_json(run: Run, tmp_path: Path, content: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(content)
    result = run("generate", "random:tiny", "Hi", "--json-schema", str(file), code=2)
    assert result.stderr.startswith(f"error: json_schema: {file} is not JSON: ")


def test_every_sampling_parameter(run: Run, talker: Path) -> None:
    asked = {"max_tokens": 12, "min_tokens": 3, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    stops = {"stop": ["qqq", "word1,"], "stop_token_ids": [7], "include_stop_str_in_output": True, "ignore_eos": True}
    expected = _direct(talker, "Hi", **asked, **stops, logprobs=2)
    options = [text for name, value in asked.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--stop", "qqq", "--stop", "word1,", "--stop-token-ids", "7", "--include-stop-str-in-output"]
    result = run("generate", str(talker), "Hi", *options, "--ignore-eos", "--logprobs", "2", "--stats")
    assert result.stdout == f"{expected.text}\n"
    assert "log-probabilities" in result.stderr
    assert expected.logprobs is not None
    assert f"{expected.logprobs[0].logprob:.3f}" in result.stderr
    assert f"2 prompt tokens, {expected.usage.completion_tokens} new in " in result.stderr
    assert result.stderr.endswith(f"ended by {expected.finish_reason}\n")


def test_engine_settings(run: Run, talker: Path) -> None:
    expected = _direct(talker, "Hi", max_tokens=8, dtype="float32", kernels="torch").text
    settings = ("--device", "cpu", "--dtype", "float32", "--kernels", "torch", "--depth", "1", "--page-size", "4")
    assert run("generate", str(talker), "Hi", "--max-tokens", "8", *settings).stdout == f"{expected}\n"
    refused = run("generate", str(talker), "Hi", "--kv-pages", "1", code=2)
    assert refused.stderr.startswith("error: prompt: ") and "kv_pages" in refused.stderr


def test_simulated(run: Run) -> None:
    result = run("generate", "sim", "Hi", "--device", "sim", "--max-tokens", "5", "--stats", "--ignore-eos")
    assert "5 new in" in result.stderr


def test_pull_prints_where_it_is(run: Run, talker: Path) -> None:
    assert run("pull", str(talker)).stdout == f"{talker}\n"
    assert run("pull", "no-such-model", code=1).stderr.startswith("error: there is no file or folder 'no-such-model'")


def test_a_bar_while_something_is_fetched() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with FetchBar(console) as bar:
        thread = threading.Thread(target=lambda: [bar("Fetching a model", done << 20, 4 << 20) for done in (1, 2, 4)])
        thread.start()
        thread.join()
        bar("Capturing CUDA graphs", 3, 40)
    assert "3 of 40" in screen.getvalue()
    assert "Fetching a model" in screen.getvalue() and "4.2 MB of 4.2 MB" in screen.getvalue()
    silent = io.StringIO()
    with FetchBar(Console(file=silent)) as bar:
        bar("Fetching a model", 1, None)
    assert not silent.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_ctrl_c_ends_it() -> None:
    with Terminal("generate", "sim", "Hi", "--device", "sim", "--ignore-eos", "--max-tokens", "4000") as program:
        program.expect("<")  # the simulated model has begun: it writes the numbers of tokens
        program.type(CTRL_C)
        assert program.end() == 130
        assert "Traceback" not in program.text


@pytest.mark.real_model
def test_a_real_model(run: Run, smollm2: Path) -> None:
    assert run("pull", "smollm2").stdout == f"{smollm2}\n"
    result = run("generate", "smollm2", "The capital of France is", "--max-tokens", "8")
    assert "Paris" in result.stdout

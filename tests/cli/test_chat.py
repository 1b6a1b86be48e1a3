"""``aphoton chat``: the conversation, and the keys that end an answer or the program."""

import asyncio
import sys
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from cli.running import Run
from cli.terminal import CTRL_D, Terminal

import aphoton.cli.chat
from aphoton import Engine, SamplingParams
from aphoton.cli.chat import Conversation, _show_all
from aphoton.cli.engine import open_engine

LONG = ("--max-tokens", "1800", "--kernels", "torch", "--dtype", "float32")
"""An answer that takes many seconds: whoever sees the prompt before has stopped it."""
MUCH = 1500
"""Characters that such an answer has far more of."""

terminal = pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")


async def _answers(model: Path, *texts: str) -> list[str]:
    messages = [{"role": "system", "content": "Be brief."}]
    async with Engine(model, max_rows=1) as engine:
        for text in texts:
            messages.append({"role": "user", "content": text})
            answer = (await engine.chat(messages, max_tokens=12)).text
            messages.append({"role": "assistant", "content": answer})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_keeps_the_conversation(run: Run, talker: Path) -> None:
    expected = asyncio.run(_answers(talker, "hi", "hi"))
    assert expected[0] != expected[1]
    result = run("chat", str(talker), "--system", "Be brief.", "--max-tokens", "12", input="hi\n\nhi\n")
    assert result.stdout == "".join(f"{answer}\n" for answer in expected)


def test_forgets_the_oldest_turn_when_it_must(run: Run, talker: Path) -> None:
    result = run("chat", str(talker), "--max-tokens", "8", "--max-model-len", "80", input="one\ntwo\nthree\n")
    assert "its oldest turn is forgotten" in result.stderr
    assert len(result.stdout.splitlines()) == 3


@pytest.mark.parametrize("wrong", ["x" * 200, "\udcff"], ids=["too long", "no text"])
def test_a_line_that_the_model_cannot_be_given(
    run: Run, talker: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of and left out, and the chat goes on; who pipes it learns of it from the exit code."""
    settings = ("--max-tokens", "4", "--max-model-len", "160")
    expected = run("chat", str(talker), *settings, input="one\ntwo\n").stdout
    lines = iter(["one", wrong, "two"])

    def read(prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)  # as of a terminal in the C locale, where any byte can be typed
    result = run("chat", str(talker), *settings, code=2)
    assert result.stdout == expected
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_a_setting_that_does_not_fit_ends_it(run: Run, talker: Path) -> None:
    result = run("chat", str(talker), "--stop-token-ids", "100000", input="one\ntwo\n", code=2)
    assert result.stderr.startswith("error: stop_token_ids: ") and result.stderr.count("\n") == 1


def test_input_that_is_not_text(run: Run, talker: Path) -> None:
    result = run("chat", str(talker), "--max-tokens", "4", input=b"\xff\n", code=2)
    assert result.stderr.startswith("error: messages: standard input is not text: ")


def test_a_model_without_a_template(run: Run) -> None:
    """It is told before anything is typed."""
    result = run("chat", "random:tiny", input="", code=2)
    assert result.stderr == "error: model: random:tiny has no chat template: use aphoton generate\n"


@terminal
def test_ctrl_c_stops_the_answer_and_not_the_program(talker: Path) -> None:
    with Terminal("chat", str(talker), *LONG) as chat:
        chat.expect("> ")
        for message in ("one", "two"):
            chat.type(f"{message}\n")
            chat.expect(f"{message}\r\n")
            chat.expect("word")  # the answer has begun
            assert len(chat.interrupt("\r\n> ")) < MUCH
        chat.type(CTRL_D)
        assert chat.end() == 0
        assert "Traceback" not in chat.text


@pytest.mark.parametrize("place", ["the wait", "the start"])
def test_ctrl_c_before_the_answer_begins(place: str, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message may not even have been made tokens of."""
    lines: list[str | None] = ["one", "two", "three", None]
    interrupts = chain([False, True], repeat(False))

    def start(*arguments: Any) -> Any:
        if next(interrupts) and place == "the start":
            raise KeyboardInterrupt
        return started(*arguments)

    def waiting(*arguments: Any, **settings: Any) -> Any:
        if len(lines) == 2 and place == "the wait" and not told:
            told.append(True)
            raise KeyboardInterrupt
        return wait(*arguments, **settings)

    told: list[bool] = []
    wait = aphoton.cli.chat.wait
    monkeypatch.setattr(aphoton.cli.chat, "wait", waiting)
    monkeypatch.setattr(aphoton.cli.chat, "_read", lambda: lines.pop(0))
    with start_blocking_portal() as portal:
        engine = portal.call(open_engine, str(talker), {"max_rows": 1, "device": "cpu"})
        conversation = Conversation(portal, engine, SamplingParams(max_tokens=30), None)
        started = portal.start_task_soon
        if place == "the start":
            monkeypatch.setattr(portal, "start_task_soon", lambda f, *a: (start if f is _show_all else started)(f, *a))
        conversation.run()
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 3
        first, second, third = (len(message["content"]) for message in conversation.messages[1::2])
        assert second < min(first, third)
        portal.call(engine.aclose)


@terminal
def test_ctrl_c_twice_at_the_prompt_quits(talker: Path) -> None:
    with Terminal("chat", str(talker)) as chat:
        chat.expect("> ")
        chat.interrupt("(Ctrl-C again or Ctrl-D quits)\r\n> ")
        chat.type("forget that\n")  # a line between, and it asks again
        chat.expect("\r\n> ")
        chat.interrupt("(Ctrl-C again or Ctrl-D quits)\r\n> ")
        chat.interrupt("\r\n")
        assert chat.end() == 0
        assert "Traceback" not in chat.text


@terminal
@pytest.mark.real_model
def test_talks_with_a_real_model(smollm2: Path) -> None:
    with Terminal("chat", str(smollm2)) as chat:
        chat.expect("> ")
        chat.type("What is the capital of France?\n")
        chat.expect("?\r\n")
        assert "Paris" in chat.expect("\r\n> ")
        chat.type("Write a very long story.\n")
        chat.expect("story.\r\n")
        chat.expect(" the ")
        chat.interrupt("\r\n> ")
        chat.type(CTRL_D)
        assert chat.end() == 0

"""``aphoton chat``.

The event loop lives in a thread of its own, and the terminal in the main thread: the loop stays live while somebody
types, and Ctrl-C arrives where Python raises it, with no signal handler of ours.
"""

import contextlib
import sys
from concurrent.futures import Future, wait
from typing import Annotated, Any

import typer
from anyio.from_thread import BlockingPortal, start_blocking_portal

from aphoton import CompletionStream, Engine, InvalidRequest, PromptTooLong, SamplingParams
from aphoton.checks import build
from aphoton.cli.engine import engine_options, open_engine
from aphoton.cli.generate import MODEL_HELP, NOT_TYPED
from aphoton.cli.options import options
from aphoton.cli.terminal import BAD_INPUT, check_output, say, show

__all__ = ["chat"]

Messages = list[dict[str, str]]

OF_A_LINE = ("prompt", "messages")
"""What is at fault when it is what has been typed, and not a setting."""


@options(
    SamplingParams, "sampling", panel="Sampling", leave_out=(*NOT_TYPED, "logprobs", "prompt_logprobs", "echo", "n")
)
@engine_options("seed", "max_rows")
def chat(
    model: Annotated[str, typer.Argument(help=f"A model with a chat template: {MODEL_HELP}")],
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    *,
    sampling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Talk to a model. Ctrl-C stops the answer; Ctrl-D, or Ctrl-C twice at the prompt, quits."""
    check_output()
    if sys.stdin is None:
        raise InvalidRequest("messages", "standard input is closed")
    params = build(SamplingParams, sampling)
    with start_blocking_portal() as portal:
        engine = portal.call(open_engine, model, {"max_rows": 1, **settings})
        try:
            if not engine.can_chat:
                raise InvalidRequest("model", f"{model} has no chat template: use aphoton generate")
            conversation = Conversation(portal, engine, params, system)
            conversation.run()
        finally:
            portal.call(engine.aclose)
    if conversation.refused and not sys.stdin.isatty():
        raise typer.Exit(BAD_INPUT)


class Conversation:
    """What has been said, and the turns of it. Lives in the main thread.

    :ivar refused: lines that the model could not be given, and that are no part of what has been said.
    """

    def __init__(self, portal: BlockingPortal, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self.messages: Messages = [] if system is None else [{"role": "system", "content": system}]
        self.refused = 0
        self._portal = portal
        self._engine = engine
        self._params = params
        self._first = len(self.messages)  # what is before is never forgotten
        self._stream: CompletionStream | None = None

    def run(self) -> None:
        """Until the user quits. A line that the model cannot be given is told of, and the next one asked for.

        :raises AphotonError: when an answer cannot be given, whatever the line.
        """
        while True:
            try:
                if (line := _read()) is None:
                    return
                if line.strip():
                    self._take(line)
            except KeyboardInterrupt:  # outside of where an answer is waited for
                self._stop()

    def _take(self, line: str) -> None:
        before = self.messages.copy()
        self.messages.append({"role": "user", "content": line})
        try:
            self._turn()
        except InvalidRequest as error:
            if error.field.partition("[")[0] not in OF_A_LINE:
                raise
            say(f"error: {error}")
            self.messages = before
            self.refused += 1

    def _stop(self) -> None:
        """End the answer that may have begun."""
        if self._stream is not None:
            self._portal.start_task_soon(self._stream.aclose)
        if self.messages and self.messages[-1]["role"] == "user":
            show("\n")
            self.messages.append({"role": "assistant", "content": ""})

    def _turn(self) -> None:
        """Answer the last message. What came before a Ctrl-C stays part of the conversation."""
        forgotten = 0
        while True:
            texts: list[str] = []
            stream = self._stream = self._engine.chat_stream(self.messages, self._params)
            answer = self._portal.start_task_soon(_show_all, stream, texts)
            try:
                self._finish(answer, stream)
            except PromptTooLong:
                if len(self.messages) <= self._first + 2:
                    raise
                del self.messages[self._first : self._first + 2]
                forgotten += 1
                continue
            show("\n")
            for _ in range(forgotten):  # not before: with a line that is too long by itself, nothing is
                say("(the conversation has become too long: its oldest turn is forgotten)")
            self.messages.append({"role": "assistant", "content": "".join(texts)})
            if texts:  # else it was stopped before it was submitted
                self._make_room(stream)
            return

    def _make_room(self, stream: CompletionStream) -> None:
        """Forget the oldest turn before the next answer would be cut short for lack of room."""
        usage = self._portal.call(stream.completion).usage
        room = self._engine.limits.max_model_len - usage.prompt_tokens - usage.completion_tokens
        if room < (self._params.max_tokens or 0) and len(self.messages) > self._first + 2:
            say("(the conversation is getting too long: its oldest turn is forgotten)")
            del self.messages[self._first : self._first + 2]

    def _finish(self, answer: Future[None], stream: CompletionStream) -> None:
        """Wait for the answer; at Ctrl-C end it."""
        while not answer.done():
            try:
                wait([answer], timeout=0.2)  # some systems tell of Ctrl-C only after a wait
            except KeyboardInterrupt:
                self._portal.start_task_soon(stream.aclose)
        answer.result()


async def _show_all(stream: CompletionStream, texts: list[str]) -> None:
    async for piece in stream:
        texts.append(piece.text)
        show(piece.text)


def _read() -> str | None:
    """The next line; None when the user quits."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() line editing and history
    interrupted = False
    while True:
        try:
            return input(prompt)
        except EOFError:
            show("\n" if prompt else "")
            return None
        except UnicodeDecodeError as error:  # what is read after it may begin anywhere
            raise InvalidRequest("messages", f"standard input is not text: {error}") from None
        except KeyboardInterrupt:
            show("\n")
            if interrupted:
                return None
            interrupted = True
            say("(Ctrl-C again or Ctrl-D quits)")

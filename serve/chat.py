"""``/v1/chat/completions``."""

import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aphoton import ConstraintFailed, FinishReason, InvalidRequest, Usage
from aphoton_serve.backend import Choice, Job, Part, Score
from aphoton_serve.errors import ApiError, describe
from aphoton_serve.hermes import ToolCall, ToolParser
from aphoton_serve.intake import Intake
from aphoton_serve.messages import read_messages
from aphoton_serve.protocol_requests import ChatRequest
from aphoton_serve.protocol_responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkCall,
    Delta,
    Finish,
    FunctionCall,
    TokenScore,
    ToolCallOut,
    TopScore,
    usage_of,
)
from aphoton_serve.sampling import chat_params, renamed, wanted_tools
from aphoton_serve.sse import Emit
from aphoton_serve.tracing import trace_of

__all__ = ["ChatEndpoint", "finish_word"]


class ChatEndpoint:
    """Answers conversations, whole or as they come."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def create(self, request: Request) -> Response:
        """``POST``."""
        body = await self._intake.read(request, ChatRequest)
        card = await self._intake.card(request, body.model)
        if not card.can_chat:
            raise ApiError(
                400,
                f"the model {body.model!r:.200} has no chat template: use /v1/completions",
                param="model",
                code="unsupported_model",
            )
        self._intake.check_prompt("messages", body.messages)
        self._intake.check_choices(1, 1 if body.n is None else body.n)
        (params, names), tools = await chat_params(body), wanted_tools(body)
        job = Job(
            params=params,
            messages=read_messages(body.messages),
            tools=[msgspec.to_builtins(tool) for tool in tools] or None,
            trace=trace_of(request.headers),
        )
        reply = ChatReply(body, names)
        if body.stream:
            return self._intake.events(request, lambda emit: self._stream(job, reply, emit))
        return await self._intake.answer(request, lambda: self._complete(job, reply))

    async def _complete(self, job: Job, reply: "ChatReply") -> ChatCompletion:
        try:
            answer = await self._intake.backend.complete(reply.model, job)
        except (InvalidRequest, ConstraintFailed, ApiError) as error:
            raise ApiError.of(renamed(describe(error), reply.names)) from None
        return ChatCompletion(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=[reply.choice(choice) for choice in answer.choices],
            usage=usage_of([answer.usage]),
        )

    async def _stream(self, job: Job, reply: "ChatReply", emit: Emit) -> None:
        stream = self._intake.backend.stream(reply.model, job)
        try:
            async for part in stream:
                for chunk in reply.chunks(part):
                    await emit(chunk)
        except (InvalidRequest, ConstraintFailed, ApiError) as error:
            raise ApiError.of(renamed(describe(error), reply.names)) from None
        finally:
            await stream.aclose()


class ChatReply:
    """One reply: from what the backend gives to what OpenAI's clients read.

    :ivar names: what the client calls the engine's parameters that have another name there.
    """

    def __init__(self, request: ChatRequest, names: dict[str, str]) -> None:
        self.names = names
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = request.model
        self._with_tools = bool(wanted_tools(request))
        self._forced = request.tool_choice not in (None, "auto", "none")
        self._many_calls = request.parallel_tool_calls is not False
        self._with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._speakers: dict[int, Speaker] = {}

    def choice(self, choice: Choice) -> ChatChoice:
        """One whole answer."""
        speaker = self._speaker()
        said = [*speaker.push(choice.text), *speaker.finish()]
        text = "".join(item for item in said if isinstance(item, str))
        calls = [ToolCallOut(id=c.id, function=c.function) for c in said if isinstance(c, ChunkCall)]
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(
                content=None if calls and not text else text,
                tool_calls=calls or msgspec.UNSET,
            ),
            finish_reason=speaker.finish_reason(choice.finish_reason),
            logprobs=_logprobs(choice.scores),
        )

    def chunks(self, part: Part) -> list[ChatChunk]:
        """What a part of the answers makes."""
        if part.usage is not None:
            return [self._usage(part.usage)] if self._with_usage else []
        chunks = []
        speaker = self._speakers.get(part.index)
        if speaker is None:
            speaker = self._speakers[part.index] = self._speaker()
            chunks.append(self._chunk(part.index, Delta(role="assistant", content="")))
        said = speaker.push(part.text)
        if part.finish_reason is not None:
            said += speaker.finish()
        logprobs = _logprobs(part.scores)
        if logprobs is not None and logprobs.content and not said:
            said = [""]  # of tokens whose text comes later
        for item in said:
            delta = Delta(content=item) if isinstance(item, str) else Delta(tool_calls=[item])
            chunks.append(self._chunk(part.index, delta, logprobs=logprobs))
            logprobs = None
        if part.finish_reason is not None:
            chunks.append(self._chunk(part.index, Delta(), finish=speaker.finish_reason(part.finish_reason)))
        return chunks

    def _speaker(self) -> "Speaker":
        return Speaker(ToolParser(forced=self._forced) if self._with_tools else None, self._many_calls)

    def _chunk(
        self, index: int, delta: Delta, *, finish: Finish | None = None, logprobs: ChatLogprobs | None = None
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=finish, logprobs=logprobs)
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[choice],
            usage=None if self._with_usage else msgspec.UNSET,
        )

    def _usage(self, usage: Usage) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=[], usage=usage_of([usage]))


class Speaker:
    """What one answer says: text, and calls of tools if there are any."""

    def __init__(self, parser: ToolParser | None, many_calls: bool) -> None:
        self._parser = parser
        self._many = many_calls
        self._calls = 0

    def push(self, text: str) -> list[str | ChunkCall]:
        """What can be told of it by now."""
        if self._parser is None:
            return [text] if text else []
        return self._numbered(self._parser.push(text))

    def finish(self) -> list[str | ChunkCall]:
        """The rest."""
        return [] if self._parser is None else self._numbered(self._parser.finish())

    def finish_reason(self, reason: FinishReason) -> Finish:
        """Why it ended, in OpenAI's words.

        :raises ApiError: when it was aborted: nobody but the server can have done it.
        """
        return "tool_calls" if self._calls and reason == "stop" else finish_word(reason)

    def _numbered(self, said: list[str | ToolCall]) -> list[str | ChunkCall]:
        numbered: list[str | ChunkCall] = []
        for item in said:
            if isinstance(item, str):
                numbered.append(item)
            elif self._many or not self._calls:
                function = FunctionCall(name=item.name, arguments=item.arguments)
                numbered.append(ChunkCall(index=self._calls, id=f"call_{uuid.uuid4().hex[:24]}", function=function))
                self._calls += 1
        return numbered


def finish_word(reason: FinishReason) -> Finish:
    """A finish reason in OpenAI's words.

    :raises ApiError: for an answer that was aborted: nobody but the server can have done it.
    """
    if reason == "abort":
        raise ApiError(503, "the server has ended the request", kind="server_error", code="aborted")
    return reason


def _logprobs(scores: tuple[Score, ...] | None) -> ChatLogprobs | None:
    if scores is None:
        return None
    return ChatLogprobs(
        content=[
            TokenScore(
                token=score.token.decode("utf-8", "replace"),
                logprob=score.logprob,
                bytes=list(score.token),
                top_logprobs=[
                    TopScore(token=token.decode("utf-8", "replace"), logprob=logprob, bytes=list(token))
                    for token, logprob in score.top
                ],
            )
            for score in scores
            if score.logprob is not None  # a prompt's first token has none
        ]
    )

"""``/v1/completions``."""

import codecs
import time
import uuid
from functools import partial
from itertools import chain

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aphoton import Usage
from aphoton_serve.backend import Answer, Job, Part, Score
from aphoton_serve.chat import finish_word
from aphoton_serve.errors import ApiError
from aphoton_serve.intake import Intake
from aphoton_serve.protocol_requests import CompletionRequest
from aphoton_serve.protocol_responses import TextChoice, TextCompletion, TextLogprobs, usage_of
from aphoton_serve.sampling import completion_params
from aphoton_serve.sse import Emit
from aphoton_serve.together import together
from aphoton_serve.tracing import trace_of

__all__ = ["CompletionEndpoint"]

_UTF8 = codecs.getincrementaldecoder("utf-8")


class CompletionEndpoint:
    """Continues prompts, several in one request."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def create(self, request: Request) -> Response:
        """``POST``."""
        body = await self._intake.read(request, CompletionRequest)
        await self._intake.card(request, body.model)
        self._intake.check_prompt("prompt", body.prompt)
        prompts, each = read_prompts(body.prompt), 1 if body.n is None else body.n
        self._intake.check_choices(len(prompts), each)
        params, trace = completion_params(body), trace_of(request.headers)
        jobs = [Job(params=params, prompt=prompt, trace=trace) for prompt in prompts]
        reply = TextReply(body)
        if body.stream:
            return self._intake.events(request, lambda emit: self._stream(jobs, each, reply, emit))
        return await self._intake.answer(request, lambda: self._complete(jobs, each, reply))

    async def _complete(self, jobs: list[Job], each: int, reply: "TextReply") -> TextCompletion:
        complete = self._intake.backend.complete
        answers = await together([partial(complete, reply.model, job) for job in jobs])
        return reply.whole(answers, each)

    async def _stream(self, jobs: list[Job], each: int, reply: "TextReply", emit: Emit) -> None:
        async def one(number: int) -> list[Usage]:
            usages = []
            stream = self._intake.backend.stream(reply.model, jobs[number])
            try:
                async for part in stream:
                    if part.usage is not None:
                        usages.append(part.usage)
                    elif part.text or part.finish_reason is not None or part.scores:
                        await emit(reply.chunk(part, number * each + part.index))
            finally:
                await stream.aclose()
            return usages

        usages = await together([partial(one, number) for number in range(len(jobs))])
        if reply.with_usage:
            await emit(reply.usage(list(chain(*usages))))


class TextReply:
    """One reply: from what the backend gives to what OpenAI's clients read."""

    def __init__(self, request: CompletionRequest) -> None:
        self.model = request.model
        self.with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets: dict[int, tuple[int, codecs.IncrementalDecoder]] = {}
        """Characters that the tokens told of have, by answer, and what is there of the next one."""

    def whole(self, answers: list[Answer], each: int) -> TextCompletion:
        """All answers to all prompts."""
        choices = [
            TextChoice(
                index=number * each + choice.index,
                text=choice.text,
                finish_reason=finish_word(choice.finish_reason),
                logprobs=self._logprobs(choice.scores, number * each + choice.index),
            )
            for number, answer in enumerate(answers)
            for choice in answer.choices
        ]
        return self._body(choices, usage_of([answer.usage for answer in answers]))

    def chunk(self, part: Part, index: int) -> TextCompletion:
        """What a part of one answer makes."""
        choice = TextChoice(
            index=index,
            text=part.text,
            finish_reason=None if part.finish_reason is None else finish_word(part.finish_reason),
            logprobs=self._logprobs(part.scores, index),
        )
        return self._body([choice], None if self.with_usage else msgspec.UNSET)

    def usage(self, usages: list[Usage]) -> TextCompletion:
        """The last chunk of a stream that asked for it."""
        return self._body([], usage_of(usages))

    def _body(self, choices: list[TextChoice], usage: object) -> TextCompletion:
        return TextCompletion(
            id=self._id,
            created=self._created,
            model=self.model,
            choices=choices,
            usage=usage,  # type: ignore[arg-type]
        )

    def _logprobs(self, scores: tuple[Score, ...] | None, index: int) -> TextLogprobs | None:
        if scores is None:
            return None
        tokens, offsets = [], []
        at, decoder = self._offsets.get(index) or (0, _UTF8("replace"))
        for score in scores:
            tokens.append(_shown(score.token))
            offsets.append(at)
            at += len(decoder.decode(score.token))
        self._offsets[index] = at, decoder
        return TextLogprobs(
            tokens=tokens,
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=[{_shown(token): value for token, value in score.top} or None for score in scores],
            text_offset=offsets,
        )


def read_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One prompt or several: text, token ids, or a list of either.

    :raises ApiError: 400, for a list of nothing, or of different kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    texts: list[str | list[int]] = [item for item in prompt if isinstance(item, str)]
    lists: list[str | list[int]] = [item for item in prompt if isinstance(item, list)]
    several = texts or lists
    if not several or len(several) != len(prompt):
        raise ApiError(
            400, "prompt: must be text, token ids, or a list of one of them", param="prompt", code="invalid_value"
        )
    return several


def _shown(token: bytes) -> str:
    """As OpenAI writes a token that is no text of its own."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

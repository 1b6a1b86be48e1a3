"""`ChatTemplate`: a conversation as the text that the model was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aphoton.errors import InvalidRequest, ModelError
from aphoton.text.quotation import Quotation

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A model's chat template: Jinja, in a sandbox, with the names that Hugging Face's templates may use.

    Compiled when first used. Safe to use from several threads at once.

    :param bos_token, eos_token: the model's, as text, for the template to put in.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template tells the model of ``tools``.

        :raises ModelError: for a template that is not Jinja.
        """
        _ = self._template  # says what is wrong with it
        return "tools" in jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        quotation: Quotation | None = None,
    ) -> str:
        """The prompt, up to the start of an answer. Encode it without adding special tokens: the template has put them
        in.

        :param messages: each with a ``role`` and a ``content``: text, or a list of ``{"type": "text", "text": ...}``,
            whose texts are joined. An assistant's content may be None beside ``tool_calls``. Other keys go to the
            template as they are.
        :param tools: functions that the model may call, as dictionaries; for a template that `takes_tools`.
        :param quotation: quotes all strings in them, for `Tokenizer.encode_quoted`.
        :raises InvalidRequest: for a message of another form, naming it, for what the template refuses, and for tools
            that it would leave out.
        :raises ModelError: for a template that is not Jinja.
        """
        checked = _check_messages(messages)
        template = self._template
        if tools and not self.takes_tools:
            raise InvalidRequest("tools", "the model's chat template does not take tools: describe them in a message")
        quote = Quotation().quote if quotation is None else quotation.quote
        try:
            text = template.render(
                messages=quote(checked),
                add_generation_prompt=True,
                # Templates ask whether these are none, and a name that is not defined is not none.
                tools=quote(list(tools)) if tools else None,
                documents=None,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("messages", "are not Unicode text: a lone surrogate") from None
        except Exception as error:  # a template is a program, and can fail in any way
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        return text if quotation is None else quotation.unescape(text)

    @cached_property
    def _environment(self) -> jinja2.Environment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template is not valid Jinja: {error.message} (line {error.lineno})"
            ) from error


class _Generation(Extension):
    """``{% generation %}`` marks the model's own words for training. Here it is what is in it."""

    tags = {"generation"}  # noqa: RUF012  # the base class's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _check_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest("messages", f"must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise InvalidRequest("messages", "must hold at least one message")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(field: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be a dictionary with role and content, not {message!r:.80}")
    for key in message:
        if not isinstance(key, str):
            raise InvalidRequest(field, f"must have strings for keys, not {key!r:.80}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role", f"must be a string such as 'user', not {role!r:.80}")
    content = message.get("content")
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return {**message, "content": None}
        raise InvalidRequest(f"{field}.content", "is missing; it must be text or a list of text parts")
    return {**message, "content": _check_content(f"{field}.content", content)}


def _check_content(field: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(field, f"must be text or a list of text parts, not {content!r:.80}")
    return "".join(_check_part(f"{field}[{i}]", part) for i, part in enumerate(content))


def _check_part(field: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(field, f"must be a dictionary with type and text, not {part!r:.80}")
    if part.get("type") != "text":
        raise InvalidRequest(f"{field}.type", f"must be 'text' for this model, not {part.get('type')!r:.80}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", f"must be text, not {text!r:.80}")
    return text

"""From what a caller gives, text, a conversation or token ids, to checked token ids."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aphoton.errors import InvalidRequest
from aphoton.offloop import in_thread, off_loop
from aphoton.text import ChatTemplate, Tokenizer
from aphoton.text.tokenizer import check_unicode

__all__ = ["Ids", "Prompt", "check_ids", "encode_chat", "encode_prompt", "encode_text"]

Prompt = str | Sequence[int]
Ids = NDArray[np.int32]


async def encode_text(field: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """:raises InvalidRequest: for what is not text, or not Unicode."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be a string, not {type(text).__name__}")

    def encode() -> list[int]:
        check_unicode(text, field)
        return tokenizer.encode(text)

    return await off_loop(len(text), encode)


async def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> Ids:
    """:raises InvalidRequest: for what is neither text nor token ids."""
    if isinstance(prompt, str):
        return np.array(await encode_text("prompt", prompt, tokenizer), np.int32)
    wanted = "text or a list of token ids"
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
        raise InvalidRequest("prompt", f"must be {wanted}: messages are for chat()")
    return check_ids("prompt", prompt, vocab_size, wanted=wanted)


async def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Ids:
    """Special tokens are those that the template puts in. What names one in a message or a tool is text like any other.

    :raises InvalidRequest: for messages that the template does not take, or without one.
    """
    if template is None:
        raise InvalidRequest("messages", "this model has no chat template: use generate() or stream()")

    def encode() -> list[int]:
        text = template.render(messages, tools)
        quoted = template.render(messages, tools, quotation=tokenizer.quotation)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.quotation.same(text, quoted):
            return ids
        # A template may ask what stands in a string, and see it quoted: that is for those who need it only.
        safe, special = tokenizer.encode_quoted(quoted), tokenizer.special_ids
        return ids if [i for i in ids if i in special] == [i for i in safe if i in special] else safe

    # However short: a template is a program, and takes what time it likes.
    return np.array(await in_thread(encode), np.int32)


def check_ids(field: str, ids: Iterable[int], vocab_size: int, *, wanted: str = "a list of token ids") -> Ids:
    """Token ids from a caller, copied.

    :param wanted: what may be given, for the error.
    :raises InvalidRequest: unless they are integers in ``0..vocab_size - 1``.
    """
    refusal = InvalidRequest(field, f"must be {wanted}")
    if isinstance(ids, bytes | bytearray | Mapping | Set):
        raise refusal
    try:
        listed = ids if isinstance(ids, np.ndarray) else list(ids)
        given = np.asarray(listed)
    except (TypeError, ValueError):
        raise refusal from None
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise refusal
    if isinstance(listed, list) and not {bool, np.bool_}.isdisjoint(map(type, listed)):  # numpy takes True for 1
        raise refusal
    if given.size and (given.min() < 0 or given.max() >= vocab_size):
        raise InvalidRequest(field, f"token ids must be from 0 to {vocab_size - 1}")
    return given.astype(np.int32)

"""`ServiceSettings`: every setting of the HTTP service, checked when it is made."""

import msgspec

from aphoton.checks import check_float, check_int
from aphoton.errors import InvalidRequest

__all__ = ["ServiceSettings"]


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP service. Every value is checked when the struct is made.

    :ivar max_body_bytes: longest request body.
    :ivar max_prompt_chars: characters in a request's prompts or messages.
    :ivar max_choices: answers that one request may ask for: its prompts times ``n``.
    :ivar request_timeout: seconds that a request may take, its queueing and the sending of its answer included. A
        client may ask for fewer with the header ``X-Request-Timeout``.
    :ivar body_timeout: seconds in which a request's body must have arrived. With ``aphoton serve`` also its head; and
        in twice which a client must have read some of an answer.
    :ivar tick_timeout: seconds after which an engine that has something to do and finishes no step is unhealthy.
    :ivar concurrency_per_key: requests of one API key at the same time. None: no limit.
    :ivar requests_per_minute: of one API key. None: no limit.
    :ivar cors_origins: web pages of these origins may call the API from a browser, such as ``https://example.org``;
        none by default.
    :ivar allowed_hosts: names by which clients may call this server (the ``Host`` header, without port). Empty: any.
    """

    max_body_bytes: int = 4 << 20
    max_prompt_chars: int = 1_000_000
    max_choices: int = 128
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    tick_timeout: float = 60.0
    concurrency_per_key: int | None = None
    requests_per_minute: int | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompt_chars", "max_choices"):
            check_int(name, getattr(self, name), 1, 2**40)
        for name in ("request_timeout", "body_timeout", "tick_timeout"):
            check_float(name, getattr(self, name), 0.0, 1e9, open_low=True)
        for name in ("concurrency_per_key", "requests_per_minute"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, 2**40)
        for name in ("cors_origins", "allowed_hosts"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not all(isinstance(value, str) and value for value in values):
                raise InvalidRequest(name, f"must be a list of strings that are not empty, not {values!r:.80}")
            msgspec.structs.force_setattr(self, name, tuple(values))

"""What the engine raises. Every error an app can meet is an `AphotonError`."""

__all__ = [
    "AphotonError",
    "ConstraintFailed",
    "DeadlineExceeded",
    "EngineClosed",
    "EngineDead",
    "EngineOverloaded",
    "InvalidRequest",
    "ModelError",
    "PromptTooLong",
]


class AphotonError(Exception):
    """Base of all errors of this package."""


class _FieldError(AphotonError):
    """:ivar field: the name of the parameter at fault, e.g. ``"top_p"``.
    :ivar reason: the message, without the name.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type["_FieldError"], tuple[str, str]]:
        return type(self), (self.field, self.reason)


class InvalidRequest(_FieldError, ValueError):
    """A request or a setting that cannot be carried out. Raised in the caller's task, at the call.

    :ivar field: the name of the parameter at fault, e.g. ``"top_p"``.
    """


class ConstraintFailed(_FieldError):
    """What a request asks of its tokens cannot be met any more: no token is left, or a grammar would cost too much.

    Ends the request wherever it is by then: tokens may have come.

    :ivar field: the name of the parameter that left nothing.
    """


class PromptTooLong(InvalidRequest):
    """The prompt, with the tokens asked for, can never fit this engine (its model length or its KV pages)."""


class EngineOverloaded(AphotonError):
    """The waiting queue is full and the engine was configured with ``overload="raise"``."""


class EngineClosed(AphotonError):
    """The engine has not been started, is closing, or has been closed."""


class EngineDead(AphotonError):
    """A device fault ended the engine. ``__cause__`` is the fault; later calls raise this too."""


class DeadlineExceeded(AphotonError, TimeoutError):
    """A request had not ended when the seconds of its ``deadline`` were over."""


class ModelError(AphotonError):
    """A model that cannot be found, read or run: the message names the file and what was expected."""

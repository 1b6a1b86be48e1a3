"""What the engine raises. Every error an app can meet is an `AphotonError`."""

__all__ = [
    "AphotonError",
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


class InvalidRequest(AphotonError, ValueError):
    """A request or a setting that cannot be carried out. Raised in the caller's task, at the call.

    :ivar field: the name of the parameter at fault, e.g. ``"top_p"``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self._message = message

    def __reduce__(self) -> tuple[type["InvalidRequest"], tuple[str, str]]:
        return type(self), (self.field, self._message)


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

"""`clear_traceback`: errors that are kept must not keep a model."""

import contextlib
import inspect
import traceback
from types import FrameType

__all__ = ["clear_traceback"]

COROUTINES = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def clear_traceback(error: BaseException) -> None:
    """Let go of what ``error`` keeps, and what it came from: a model, in the variables of calls that have ended."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            for frame, _ in traceback.walk_tb(one.__traceback__):
                if not _may_go_on(frame):
                    with contextlib.suppress(RuntimeError):  # it still runs
                        frame.clear()
            chain += [one.__cause__, one.__context__]


def _may_go_on(frame: FrameType) -> bool:
    """Whether it is somebody else's coroutine, which may have caught the error and go on: clearing it would end it."""
    ours = str(frame.f_globals.get("__name__")).partition(".")[0] == "aphoton"
    return not ours and bool(frame.f_code.co_flags & COROUTINES)

"""`clear_traceback`: errors that are kept must not keep a model."""

import traceback

__all__ = ["clear_traceback"]


def clear_traceback(error: BaseException) -> None:
    """Let go of what ``error`` keeps, and what it came from: a model, in the variables of calls that have ended."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]

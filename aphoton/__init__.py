"""An asyncio-native, embeddable inference engine for language models.

::

    async with aphoton.Engine("smollm2") as engine:
        done = await engine.generate("Once upon a time", max_tokens=64)
        async for piece in engine.stream("Once upon a time"):
            print(piece.text, end="")
"""

from aphoton.completion import Completion, FinishReason, Output, Piece, Timings, TokenLogprob, Usage
from aphoton.config import EngineConfig
from aphoton.device.sim import SimCosts, SimModel
from aphoton.engine import Engine
from aphoton.errors import (
    AphotonError,
    DeadlineExceeded,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    ModelError,
    PromptTooLong,
)
from aphoton.observe import Stats
from aphoton.sampling import LogitsProcessor, SamplingParams
from aphoton.stream import CompletionStream

__all__ = [
    "AphotonError",
    "Completion",
    "CompletionStream",
    "DeadlineExceeded",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineOverloaded",
    "FinishReason",
    "InvalidRequest",
    "LogitsProcessor",
    "ModelError",
    "Output",
    "Piece",
    "PromptTooLong",
    "SamplingParams",
    "SimCosts",
    "SimModel",
    "Stats",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
]

__version__ = "0.1.0"

"""A FastAPI app with the engine inside: it streams its answers, and a client that goes ends its request.

APHOTON_MODEL=smollm2 uvicorn --app-dir examples webapp:app
curl -N localhost:8000/continue -H 'content-type: application/json' -d '{"text": "Once upon a time"}'
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

import aphoton


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    model = os.environ.get("APHOTON_MODEL", "smollm2")
    async with aphoton.Engine(model, overload="raise") as engine:  # a full queue is the client's to know of
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


def engine_of(request: Request) -> aphoton.Engine:
    engine: aphoton.Engine = request.app.state.engine
    return engine


Engine = Annotated[aphoton.Engine, Depends(engine_of)]


class Beginning(BaseModel):
    text: str = Field(max_length=10_000)
    max_tokens: int = Field(default=200, ge=1, le=2000)


@app.post("/continue")
async def continue_text(beginning: Beginning, engine: Engine) -> StreamingResponse:
    stream = engine.stream(beginning.text, max_tokens=beginning.max_tokens, temperature=0.8)
    try:
        first = await anext(stream)  # what is wrong with a request shows here, while there is a status code to say so
    except aphoton.EngineOverloaded as error:
        raise HTTPException(429, str(error)) from error
    except (aphoton.InvalidRequest, aphoton.PromptTooLong) as error:
        raise HTTPException(400, str(error)) from error

    async def texts() -> AsyncIterator[str]:
        async with stream:  # the app closes this when the client goes, and this ends the request
            yield first.text
            async for piece in stream:
                yield piece.text

    return StreamingResponse(texts(), media_type="text/plain; charset=utf-8")

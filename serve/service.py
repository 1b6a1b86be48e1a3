"""`make_app`: the HTTP service as an ASGI application."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aphoton import InvalidRequest
from aphoton_serve.backend import Backend, ModelCard
from aphoton_serve.chat import ChatEndpoint
from aphoton_serve.completions import CompletionEndpoint
from aphoton_serve.errors import ApiError, describe, problem_response
from aphoton_serve.gate import Gate
from aphoton_serve.intake import Intake
from aphoton_serve.keys import KeyRing
from aphoton_serve.limiter import Limiter
from aphoton_serve.metrics import exposition
from aphoton_serve.page import page
from aphoton_serve.protocol_requests import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from aphoton_serve.protocol_responses import Model, ModelList, encode
from aphoton_serve.sampling import renamed
from aphoton_serve.settings import ServiceSettings

__all__ = ["make_app"]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def make_app(
    backend: Backend,
    settings: ServiceSettings | None = None,
    *,
    keys: KeyRing | None = None,
    lifespan: Lifespan | None = None,
) -> Starlette:
    """The service over ``backend``.

    :param keys: open it; without any it is open to all who reach it.
    :param lifespan: of the application, as Starlette takes it: where a backend is started and closed.
    """
    settings = settings or ServiceSettings()
    intake = Intake(backend, settings)
    plain = PlainEndpoints(intake)
    limiter = Limiter(concurrent=settings.concurrency_per_key, per_minute=settings.requests_per_minute)
    middleware = [
        Middleware(Gate, keys=keys or KeyRing(), limiter=limiter, hosts=settings.allowed_hosts),
    ]
    if settings.cors_origins:
        # Outside the gate: a browser's preflight brings no key.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send some of their own
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[
            Route("/", page),
            Route("/v1/models", plain.models),
            Route("/v1/models/{id:path}", plain.model),
            Route("/v1/chat/completions", ChatEndpoint(intake).create, methods=["POST"]),
            Route("/v1/completions", CompletionEndpoint(intake).create, methods=["POST"]),
            Route("/v1/embeddings", plain.embeddings, methods=["POST"]),
            Route("/tokenize", plain.tokenize, methods=["POST"]),
            Route("/detokenize", plain.detokenize, methods=["POST"]),
            Route("/health", plain.health),
            Route("/metrics", plain.metrics),
            Route("/ticks", plain.ticks),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _not_routed},  # whatever else goes wrong is the gate's to answer
        lifespan=lifespan,
    )


class PlainEndpoints:
    """The endpoints that answer in one go."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._backend = intake.backend

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return _json(ModelList(data=[_model(await self._intake.card(request, name)) for name in self._backend.names]))

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        return _json(_model(await self._intake.card(request, request.path_params["id"])))

    async def embeddings(self, request: Request) -> Response:
        """``POST /v1/embeddings``: no model makes any, and each says so."""
        body = await self._intake.read(request, EmbeddingRequest)
        await self._intake.card(request, body.model)
        raise ApiError(
            400, f"the model {body.model!r:.200} makes no embeddings", param="model", code="unsupported_model"
        )

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        body = await self._intake.read(request, TokenizeRequest)
        card = await self._intake.card(request, body.model)
        self._intake.check_prompt("prompt", body.prompt)

        async def work() -> dict[str, object]:
            tokens = await self._backend.tokenize(body.model, body.prompt)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": card.max_model_len}

        return await self._intake.answer(request, work)

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        body = await self._intake.read(request, DetokenizeRequest)
        await self._intake.card(request, body.model)

        async def work() -> dict[str, str]:
            try:
                return {"prompt": await self._backend.detokenize(body.model, body.tokens)}
            except (InvalidRequest, ApiError) as error:
                raise ApiError.of(renamed(describe(error), {"ids": "tokens"})) from None

        return await self._intake.answer(request, work)

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 while every engine works, else 503, and what is wrong with which."""
        models = await self._backend.health()
        well = all(wrong is None for wrong in models.values())
        body = {"status": "ok" if well else "unhealthy", "models": {name: w or "ok" for name, w in models.items()}}
        return Response(encode(body), 200 if well else 503, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics``, for Prometheus."""
        text = exposition(await self._backend.metrics())
        return Response(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def ticks(self, request: Request) -> Response:
        """``GET /ticks?model=...``: what the engine has done lately, for the page."""
        model = request.query_params.get("model")
        if model is None:
            raise ApiError(400, "model is missing: /ticks?model=NAME", param="model", code="missing_required_parameter")
        await self._intake.card(request, model)
        return _json(await self._backend.ticks(model))


def _model(card: ModelCard) -> Model:
    return Model(**msgspec.structs.asdict(card))


def _json(body: object) -> Response:
    return Response(encode(body), media_type="application/json")


async def _not_routed(request: Request, error: Exception) -> Response:
    """A path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, code = f"there is nothing at {request.url.path!r:.200}", "unknown_url"
    elif error.status_code == 405:
        message, code = f"{request.method} is not allowed here", "method_not_allowed"
    else:
        message, code = error.detail, None
    response = problem_response(ApiError(error.status_code, message, code=code).problem)
    response.headers.update(error.headers or {})
    return response

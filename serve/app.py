"""`build`: the Ray Serve application.

``serve run aphoton_serve.app:build model=smollm2`` on a laptop; ``serve deploy`` with the same arguments in YAML on a
cluster. Each model has a deployment of its own, whose replicas hold an engine each. One more has the HTTP endpoints,
unless there is but one model with one replica: that one has them itself.
"""

from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from aphoton import EngineConfig, InvalidRequest
from aphoton.checks import check_float, check_int
from aphoton_serve.keys import KeyRing, read_keys
from aphoton_serve.naming import names_of
from aphoton_serve.remote import RemoteBackend
from aphoton_serve.replica import EngineReplica, ServiceReplica
from aphoton_serve.routing import ConversationRouter
from aphoton_serve.scaling import replicas_wanted
from aphoton_serve.service import make_app
from aphoton_serve.settings import ServiceSettings

__all__ = ["ModelArgs", "ServiceArgs", "application", "build", "run"]

INGRESS_REQUESTS = 10_000
"""That one replica of the endpoints may hold: they only pass on what engines say."""
BUSY = 0.75
"""Share of an engine's rows that autoscaling aims at."""
INTERVAL = 10.0
"""Seconds between two reports to Serve's autoscaler, by default. What it looks back on must be longer."""
SLACK = 4
"""A conversation goes to the replica that holds it if that has no more than a ``1 / SLACK`` of its rows more running
than the idlest replica."""


class ModelArgs(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments for one model, beside the engine's settings.

    :ivar model: what `aphoton.Engine` takes; ``NAME=MODEL`` offers it under a name of its own.
    :ivar min_replicas: 0 lets a model that nobody asks for have none.
    :ivar max_replicas: more than ``min_replicas``: as many as the requests need.
    :ivar target_requests: of each replica, at which scaling aims. None: three quarters of ``max_rows``. It aims at four
        fifths of the KV pages, too, and the one that needs more replicas counts.
    :ivar upscale_delay: seconds for which more replicas must be wanted.
    :ivar downscale_delay: seconds for which fewer must be wanted, none at all included.
    :ivar look_back: seconds over which the requests and the pages are averaged. At least 1: replicas tell of them three
        times in so long.
    :ivar num_gpus: of each replica; 0.5 is half of one.
    :ivar num_cpus: of each replica.
    """

    model: str
    overload: Any = "raise"
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float | None = None
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    look_back: float = 30.0
    num_gpus: float = 0.0
    num_cpus: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("min_replicas", self.min_replicas, 0, 10_000)
        check_int("max_replicas", self.max_replicas, max(1, self.min_replicas), 10_000)
        if self.target_requests is not None:
            check_float("target_requests", self.target_requests, 0.0, 1e6, open_low=True)
        check_float("upscale_delay", self.upscale_delay, 0.0, 1e6)
        check_float("downscale_delay", self.downscale_delay, 0.0, 1e6)
        check_float("look_back", self.look_back, 1.0, 1e6)
        check_float("num_gpus", self.num_gpus, 0.0, 1024.0)
        check_float("num_cpus", self.num_cpus, 0.0, 1024.0)


class ServiceArgs(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments for the endpoints, beside the service's settings.

    :ivar ingress_replicas: of the endpoints, whose limits by key are each replica's own. None: one, or, for one model
        with one replica, none: that replica has the endpoints itself.
    :ivar api_keys_file: see `read_keys`; read where the application is built. Only hashes go further.
    :ivar grace: seconds that running requests get when a replica is to end.
    """

    ingress_replicas: int | None = None
    api_keys_file: str | None = None
    grace: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ingress_replicas is not None:
            check_int("ingress_replicas", self.ingress_replicas, 1, 1000)
        check_float("grace", self.grace, 0.0, 1e6)


def build(args: dict[str, Any]) -> Application:
    """The application.

    :param args: fields of `ModelArgs` and `ServiceArgs`; values may be text, as they are on a command line. With
        ``models``, a list of fields of `ModelArgs`, it has several models, and what is given beside them holds for all.
    :raises InvalidRequest: for an argument that does not exist or cannot be.
    """
    rest = dict(args)
    listed = rest.pop("models", None)
    service = {name: rest.pop(name) for name in ServiceArgs.__struct_fields__ if name in rest}
    if listed is None:
        listed = [{}]
    elif not isinstance(listed, list) or not listed or not all(isinstance(one, dict) for one in listed):
        raise InvalidRequest("models", "must be a list of mappings, each with a model")
    models = [_read(ModelArgs, {**rest, **one}) for one in listed]
    made = _read(ServiceArgs, service)
    return application(models, made, read_keys(made.api_keys_file))


def application(models: list[ModelArgs], service: ServiceArgs, keys: KeyRing) -> Application:
    """The application, from arguments that are checked.

    Its HTTP deployment has handles of the engines' deployments, unless there is but one engine: that one's replica has
    the endpoints, too, which spares each piece of text a message between actors.
    """
    names = names_of(one.model for one in models)
    settings = ServiceSettings(**{name: getattr(service, name) for name in ServiceSettings.__struct_fields__})
    if service.ingress_replicas is None and len(models) == 1 and models[0].max_replicas == models[0].min_replicas == 1:
        ((name, source),) = names.items()
        options = _engine_options(name, models[0], service) | {
            "max_ongoing_requests": INGRESS_REQUESTS,  # the engine itself says when its queue is full
            "max_queued_requests": -1,
            "request_router_config": RequestRouterConfig(),  # there is nothing to choose
        }
        together: Any = serve.deployment(**options)(serve.ingress()(ServiceReplica))
        alone: Application = together.bind(name, source, _engine_settings(models[0]), settings, keys)
        return alone
    handles = {
        name: _engine(name, source, one, service) for (name, source), one in zip(names.items(), models, strict=True)
    }
    ingress: Any = serve.deployment(
        name="service",
        num_replicas=service.ingress_replicas or 1,
        max_ongoing_requests=INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=service.grace,
        ray_actor_options={"num_cpus": 0.1},
    )(serve.ingress()(Ingress))
    sleepers = [name for name, one in zip(names, models, strict=True) if one.min_replicas == 0]
    bound: Application = ingress.bind(handles, sleepers, settings, keys)
    return bound


def run(
    models: dict[str, str],
    settings: dict[str, Any],
    service: ServiceSettings,
    keys: KeyRing,
    *,
    host: str,
    port: int,
    grace: float,
) -> None:
    """Serve models through Ray on this machine, until Ctrl-C."""
    args = [ModelArgs(model=f"{name}={model}", **settings) for name, model in models.items()]
    made = ServiceArgs(**msgspec.structs.asdict(service), grace=grace)
    serve.start(http_options={"host": host, "port": port})
    serve.run(application(args, made, keys), blocking=True)


class Ingress:
    """The endpoints, over handles of engines."""

    def __init__(self, handles: dict[str, Any], sleepers: list[str], settings: ServiceSettings, keys: KeyRing) -> None:
        self._app = make_app(RemoteBackend(handles, sleepers), settings, keys=keys)

    def __serve_build_asgi_app__(self) -> Any:  # Serve's name
        return self._app


def _engine(name: str, source: str, args: ModelArgs, service: ServiceArgs) -> Application:
    """A deployment of one model."""
    deployment: Any = serve.deployment(**_engine_options(name, args, service))(EngineReplica)
    bound: Application = deployment.bind(name, source, _engine_settings(args), tick_timeout=service.tick_timeout)
    return bound


def _engine_settings(args: ModelArgs) -> dict[str, Any]:
    return {field: getattr(args, field) for field in EngineConfig.__struct_fields__}


def _engine_options(name: str, args: ModelArgs, service: ServiceArgs) -> dict[str, Any]:
    """Of a deployment of one model.

    Serve hands a replica as many requests as its engine holds: those that run, and those in its own queue. A batch
    would never fill otherwise.
    """
    options: dict[str, Any] = {
        "name": f"engine-{name.replace('#', '_')}",
        "max_ongoing_requests": args.max_rows + args.max_waiting,
        "max_queued_requests": args.max_waiting or 1,
        "graceful_shutdown_timeout_s": service.grace,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "ray_actor_options": {"num_cpus": args.num_cpus, "num_gpus": args.num_gpus},
        "request_router_config": RequestRouterConfig(
            request_router_class=ConversationRouter,
            request_router_kwargs={"rows": args.max_rows, "slack": max(1, args.max_rows // SLACK)},
        ),
    }
    if args.max_replicas == args.min_replicas:
        return options | {"num_replicas": args.min_replicas}
    # Serve's field for it is deprecated, and what is to replace it has no effect yet: it stays unless it must change.
    interval: dict[str, Any] = {} if args.look_back >= 3 * INTERVAL else {"metrics_interval_s": args.look_back / 3}
    return options | {
        "autoscaling_config": interval
        | {
            "min_replicas": args.min_replicas,
            "max_replicas": args.max_replicas,
            "target_ongoing_requests": args.target_requests or max(1.0, BUSY * args.max_rows),
            "upscale_delay_s": args.upscale_delay,
            "downscale_delay_s": args.downscale_delay,
            "look_back_period_s": args.look_back,
            "policy": {"policy_function": replicas_wanted},
        }
    }


def _read(kind: type[Any], fields: dict[str, Any]) -> Any:
    """:raises InvalidRequest: naming the argument."""
    for name in fields:
        if name not in kind.__struct_fields__:
            raise InvalidRequest(name, "there is no such argument")
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):  # of the struct's own checks
            raise error.__cause__ from None
        what, _, where = str(error).partition(" - at `$.")
        raise InvalidRequest(where.rstrip("`") or "args", what) from None

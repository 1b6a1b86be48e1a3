"""The Serve configuration in the manifests, and what it must have in common with the pods and the image."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s.kustomizing import FOLDER, Manifest, documents, groups, rendered
from typer.main import get_command

from aphoton import EngineConfig

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OVERLAYS = ("cpu", "gpu")
DOCKERFILE = FOLDER / "Dockerfile"


def application(overlay: str) -> Manifest:
    config = yaml.safe_load(rendered(overlay)["RayService"]["spec"]["serveConfigV2"])
    (app,) = config["applications"]
    found: Manifest = app
    return found


def arguments(overlay: str) -> tuple[Any, list[Any]]:
    """The arguments as `build` reads them: of the service, and of each model."""
    from aphoton_serve import app

    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "application", lambda models, service, keys: seen.extend((models, service)))
        patch.setattr(app, "read_keys", lambda file: None)
        app.build(application(overlay)["args"])
    models, service = seen
    return service, models


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_takes_the_configuration(overlay: str) -> None:
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    from aphoton_serve.app import build

    config = yaml.safe_load(rendered(overlay)["RayService"]["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(config)
    (app,) = schema.applications
    assert app.import_path == "aphoton_serve.app:build"
    assert import_attr(app.import_path) is build
    assert schema.http_options.host == "0.0.0.0"
    head, worker = groups(rendered(overlay)["RayService"])
    for pod in (head, worker):
        assert {"name": "serve", "containerPort": schema.http_options.port} in pod["containers"][0]["ports"]
    assert worker["containers"][0]["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_application_builds(overlay: str, tmp_path: Path) -> None:
    from ray.serve import Application

    from aphoton_serve.app import build

    keys = tmp_path / "keys"
    (secret,) = documents(FOLDER / "secret.example.yaml")
    keys.write_text(secret["stringData"]["keys"])
    assert isinstance(build({**application(overlay)["args"], "api_keys_file": str(keys)}), Application)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_keys_are_where_the_application_reads_them(overlay: str) -> None:
    service, _ = arguments(overlay)
    for pod in groups(rendered(overlay)["RayService"]):
        # It may be built on any node.
        (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "keys")
        (item,) = next(one for one in pod["volumes"] if one["name"] == "keys")["secret"]["items"]
        assert f"{mount['mountPath']}/{item['path']}" == service.api_keys_file


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_ends_before_the_longest_answer(overlay: str) -> None:
    ray_service = rendered(overlay)["RayService"]
    service, _ = arguments(overlay)
    _, worker = groups(ray_service)
    *command, seconds = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python", "/opt/aphoton/drain.py"]
    assert "COPY k8s/drain.py /opt/aphoton/drain.py" in stages()[overlay]
    assert service.request_timeout < service.grace < int(seconds) < worker["terminationGracePeriodSeconds"]
    assert service.grace < ray_service["spec"]["rayClusterDeletionDelaySeconds"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_replicas_fit_in_the_workers(overlay: str) -> None:
    _, models = arguments(overlay)
    ray_service = rendered(overlay)["RayService"]
    (group,) = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    cpus, gpus = float(limits["cpu"]), float(limits.get("nvidia.com/gpu", 0))
    for model in models:
        assert model.num_cpus + 0.2 < cpus and model.num_gpus <= gpus  # 0.1 of each replica of the endpoints
        assert model.device == ("cuda" if gpus else "cpu") and bool(model.num_gpus) == bool(gpus)
    assert sum(model.max_replicas * model.num_cpus for model in models) <= cpus * group["maxReplicas"]
    assert sum(model.max_replicas * model.num_gpus for model in models) <= gpus * group["maxReplicas"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def stages() -> dict[str, list[str]]:
    """The Dockerfile's lines, continued ones joined, by stage; "" is what stands before the first."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {"": []}
    for line in text.splitlines():
        if line.startswith("FROM "):
            found[line.rpartition(" AS ")[2]] = []
        if line and not line.startswith("#"):
            list(found.values())[-1].append(line)
    return found


def value(stage: str, name: str) -> str:
    (line,) = (line for line in stages()[stage] if line.startswith(f"ARG {name}="))
    return line.partition("=")[2]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_image_has_the_clusters_ray(overlay: str) -> None:
    service = rendered(overlay)["RayService"]
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == value(f"{overlay}-packages", "RAY")
    for pod in groups(service):
        (container,) = pod["containers"]
        assert container["image"] == f"aphoton:{overlay}"
        (user,) = (line for line in stages()[overlay] if line.startswith("USER "))
        assert user == f"USER {pod['securityContext']['runAsUser']}"


def test_the_image_has_the_kernels_of_what_is_served() -> None:
    from aphoton.cli.app import app

    (run,) = (line for line in stages()["gpu-kernels"] if line.startswith("RUN aphoton prebuild "))
    line = re.sub(r"\$\{(\w+)\}", lambda found: value("gpu-kernels", found[1]), run)
    command: Any = get_command(app)
    options = command.commands["prebuild"].make_context("prebuild", line.split()[3:]).params
    assert str(options["out"]) == "/opt/kernels" and options["arch"] == "9.0a"
    assert "ENV APHOTON_KERNELS=/opt/kernels" in stages()["gpu"]
    assert "COPY --from=gpu-kernels /opt/kernels /opt/kernels" in stages()["gpu"]
    _, (model,) = arguments("gpu")
    assert options["model"] == model.model
    for name in ("dtype", "max_rows", "max_model_len", "page_size"):
        given = options.get(name)
        assert getattr(model, name) == (getattr(EngineConfig(), name) if given is None else given), name


def test_what_the_image_copies_is_there() -> None:
    allowed = {line[1:] for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied: set[str] = set()
    for lines in stages().values():
        for line in lines:
            if line.startswith("COPY ") and "--from=" not in line:
                copied |= set(line.split()[1:-1])
            elif line.startswith("COPY --from="):
                assert line.split()[1].removeprefix("--from=") in stages()
            elif line.startswith("FROM ") and "/" not in line and ":" not in line:
                assert line.split()[1] in stages()
    assert copied == allowed
    assert all((FOLDER.parent / name).exists() for name in copied)

"""The manifests: valid against the schemas of their kinds, and each name that one gives to another exists."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from k8s.kustomizing import FOLDER, Manifest, documents, groups, render, rendered

import aphoton_serve.service
from aphoton_serve.keys import read_keys
from aphoton_serve.local import LocalBackend

CRD_VARIABLE = "APHOTON_KUBERAY_CRD"
"""Names KubeRay's ray.io_rayservices.yaml."""
OVERLAYS = ("cpu", "gpu")
FOREIGN = ("RayService", "ServiceMonitor")
"""Kinds that Kubernetes itself does not have."""
SECRET = FOLDER / "secret.example.yaml"


@pytest.fixture(scope="module")
def schema() -> Manifest:
    """Of a RayService, from KubeRay's CRD."""
    path = os.environ.get(CRD_VARIABLE)
    if not path:
        pytest.skip(f"{CRD_VARIABLE} does not name KubeRay's ray.io_rayservices.yaml")
    (crd,) = documents(Path(path))
    assert crd["spec"]["group"] == "ray.io"
    (v1,) = (version for version in crd["spec"]["versions"] if version["name"] == "v1")
    assert v1["served"]
    return _closed(v1["schema"]["openAPIV3Schema"])


def _closed(schema: Any) -> Any:
    """A CRD's schema for jsonschema. A field that it does not have is dropped by Kubernetes without a word: here it is
    an error."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _closed(one) for name, one in schema.items()}
    if made.pop("x-kubernetes-int-or-string", None) is True:
        made["type"] = ["integer", "string"]
        made.pop("anyOf", None)
    if isinstance(made.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_rayservice_is_kuberays(overlay: str, schema: Manifest) -> None:
    jsonschema.Draft202012Validator(schema).validate(rendered(overlay)["RayService"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterDeletionDelaySecond"), 1),
        (("spec", "rayClusterConfig", "workerGroupSpecs"), {}),
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "terminationGracePeriod"), 1),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
    ],
)
def test_the_crd_would_find_a_slip(path: tuple[str, ...], value: object, schema: Manifest) -> None:
    service = rendered("cpu")["RayService"]
    place = service
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(service)


def _own_kinds() -> Iterator[tuple[str, Manifest]]:
    for overlay in OVERLAYS:
        for kind, manifest in rendered(overlay).items():
            if kind not in FOREIGN:
                yield f"{overlay} {kind}", manifest
    for manifest in documents(SECRET):
        yield SECRET.name, manifest


@pytest.mark.parametrize("manifest", [pytest.param(one, id=name) for name, one in _own_kinds()])
def test_the_others_are_kubernetes(manifest: Manifest) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for version in ("1.29", validate.latest_version()):
        validate.validate(manifest, version, strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**manifest, "slip": 1}, validate.latest_version(), strict=True)


def test_no_file_is_left_out() -> None:
    """Every manifest here is one of those that the tests read."""
    read = {SECRET}
    for folder in [path.parent for path in FOLDER.rglob("kustomization.yaml")]:
        assert render(folder)
        (kustomization,) = documents(folder / "kustomization.yaml")
        named = kustomization.get("resources", []) + [patch["path"] for patch in kustomization.get("patches", ())]
        read |= {folder / "kustomization.yaml", *(folder / name for name in named)}
    assert {path.resolve() for path in read} >= set(FOLDER.rglob("*.yaml"))


def test_volumes_claims_and_secrets_exist() -> None:
    (secret,) = documents(SECRET)
    for overlay in OVERLAYS:
        manifests = rendered(overlay)
        claims = {manifests["PersistentVolumeClaim"]["metadata"]["name"]}
        for pod in groups(manifests["RayService"]):
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            (container,) = pod["containers"]
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    claims.remove(volume["persistentVolumeClaim"]["claimName"])
                elif "secret" in volume:
                    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
                    # Not the key itself, which is in the Secret for Prometheus.
                    assert [item["key"] for item in volume["secret"]["items"]] == ["keys"]
                    assert "keys" in secret["stringData"]
        assert not claims, "a claim that nobody mounts"


def test_the_example_opens_for_nobody(tmp_path: Path) -> None:
    (secret,) = documents(SECRET)
    file = tmp_path / "keys"
    file.write_text(secret["stringData"]["keys"])
    keys = read_keys(file)
    assert len(keys) == 2
    assert all(keys.name_of(key) is None for key in ("", "REPLACE-ME", "0" * 64))


def test_prometheus_finds_the_service() -> None:
    manifests = rendered("gpu")
    service, monitor = manifests["RayService"], manifests["ServiceMonitor"]
    # KubeRay makes a service with this label, for the head's port of this name.
    assert monitor["spec"]["selector"]["matchLabels"] == {"ray.io/serve": f"{service['metadata']['name']}-serve"}
    (endpoint,) = monitor["spec"]["endpoints"]
    head, worker = groups(service)
    for pod in (head, worker):
        ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
        assert ports[endpoint["port"]] == 8000
    routes = aphoton_serve.service.make_app(LocalBackend({})).routes
    assert endpoint["path"] in [route.path for route in routes]  # type: ignore[attr-defined]
    (secret,) = documents(SECRET)
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == secret["metadata"]["name"] and credentials["key"] in secret["stringData"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_may_do_little(overlay: str) -> None:
    manifests = rendered(overlay)
    for pod in groups(manifests["RayService"]):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] >= 10_000
        (container,) = pod["containers"]
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        # Ray's own ports are for the cluster, and every pod of it is under the policy that says so.
    cluster = manifests["RayService"]["spec"]["rayClusterConfig"]
    policy = manifests["NetworkPolicy"]["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"] == policy["podSelector"]["matchLabels"]
    open_to_all = [rule["ports"] for rule in policy["ingress"] if "from" not in rule]
    assert open_to_all == [[{"port": 8000}]]


def test_yaml_has_no_key_twice() -> None:
    """YAML takes the second of two, without a word."""

    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> Any:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"twice, at {node.start_mark}"
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    for path in FOLDER.rglob("*.yaml"):
        list(yaml.load_all(path.read_text(), Strict))
    with pytest.raises(AssertionError):
        yaml.load("{a: 1, a: 2}", Strict)

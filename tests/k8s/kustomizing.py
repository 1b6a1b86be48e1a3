"""What kustomize makes of an overlay, as far as the overlays here go: no more is known than they use."""

import copy
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FOLDER", "Manifest", "documents", "groups", "render", "rendered"]

FOLDER = Path(__file__).parents[2] / "k8s"

Manifest = dict[str, Any]

KNOWN = {"apiVersion", "kind", "resources", "images", "patches", "configMapGenerator"}
KUSTOMIZATION = ("kustomize.config.k8s.io/v1beta1", "Kustomization")


def documents(path: Path) -> list[Manifest]:
    """What a YAML file holds."""
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def rendered(overlay: str) -> dict[str, Manifest]:
    """The manifests of an overlay, by kind: it has at most one of each."""
    made = render(FOLDER / "overlays" / overlay)
    by_kind = {one["kind"]: one for one in made}
    assert len(by_kind) == len(made)
    return by_kind


def groups(service: Manifest) -> list[Manifest]:
    """The pod specifications: the head's, then the workers'."""
    cluster = service["spec"]["rayClusterConfig"]
    return [one["template"]["spec"] for one in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def render(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization. Whatever it names must be there."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    assert set(kustomization) <= KNOWN, "a field that these tests do not know"
    assert (kustomization["apiVersion"], kustomization["kind"]) == KUSTOMIZATION
    found: list[Manifest] = []
    for name in kustomization.get("resources", ()):
        path = folder / name
        found += render(path) if path.is_dir() else documents(path)
    for generator in kustomization.get("configMapGenerator", ()):
        found.append(_config_map(folder, generator))
    for patch in kustomization.get("patches", ()):
        target = _only(found, **patch["target"])
        (operations,) = documents(folder / patch["path"])
        for operation in operations:
            _apply(target, **operation)
    for image in kustomization.get("images", ()):
        used = [one for one in _containers(found) if one["image"] == image["name"]]
        assert used, f"no container has the image {image['name']}"
        for container in used:
            container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names), "two of one name"
    return found


def _config_map(folder: Path, generator: Manifest) -> Manifest:
    # kustomize refuses files outside its own folder.
    assert all(Path(name).name == name for name in generator["files"])
    options = generator["options"]
    assert options["disableNameSuffixHash"] is True
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"], "labels": options["labels"]},
        "data": {name: (folder / name).read_text() for name in generator["files"]},
    }


def _only(manifests: list[Manifest], *, kind: str, name: str) -> Manifest:
    (one,) = (one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == name)
    return one


def _apply(target: Any, *, op: str, path: str, value: Any) -> None:
    """A JSON patch (RFC 6902) of the two kinds that are used: ``replace`` needs what it replaces, ``add`` a place."""
    *parents, last = path.removeprefix("/").split("/")
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    assert isinstance(target, dict), path
    assert op in ("add", "replace"), op
    assert (last in target) == (op == "replace"), f"{op} {path}"
    target[last] = copy.deepcopy(value)


def _containers(found: Any) -> list[Manifest]:
    if isinstance(found, list):
        return [container for one in found for container in _containers(one)]
    if not isinstance(found, dict):
        return []
    own = [container for container in found.get("containers", ()) if "image" in container]
    return own + [container for one in found.values() if isinstance(one, dict | list) for container in _containers(one)]

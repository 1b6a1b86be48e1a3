"""`use_prebuilt`: the kernels that `aphoton prebuild` has compiled, for this process."""

import functools
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from aphoton.errors import InvalidRequest

__all__ = ["VARIABLE", "begin", "parse_arch", "prebuilt_folder", "seal", "use_prebuilt"]

VARIABLE = "APHOTON_KERNELS"
"""Environment variable that names the folder."""

FILE = "versions.json"
PACKAGES = {
    "aphoton": "aphoton",
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "tvm-ffi": "apache-tvm-ffi",
}
"""What compiled kernels depend on: the names in the file, and the distributions."""

HERE = ("python", "machine")
"""And what else they do: Triton's host modules are for one Python."""

_used: list[Path] = []
"""The folder in use, if there is one: Triton makes its cache managers itself, and gives them no more than a key."""


def parse_arch(arch: str) -> tuple[int, int]:
    """The compute capability of an architecture's name: (9, 0) of ``9.0a``.

    :raises InvalidRequest: when it is none.
    """
    found = re.fullmatch(r"(\d+)\.(\d)[af]?", arch)
    if found is None:
        raise InvalidRequest("arch", f"must be a compute capability like 9.0a or 8.0, not {arch!r}")
    return int(found[1]), int(found[2])


def prebuilt_folder() -> Path | None:
    """The folder of `use_prebuilt`; None before, and where there is none."""
    return _used[0] if _used else None


def use_prebuilt(device: torch.device) -> None:
    """Have Triton and FlashInfer look for kernels where ``$APHOTON_KERNELS`` says; nothing where it says nothing.

    A folder that was made by other versions is left alone, with a warning, and kernels are compiled as without it:
    what FlashInfer compiles is loaded by name alone, and would be called wrongly.

    :raises InvalidRequest: when there is no such folder.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return
    folder = Path(named).absolute()
    if not _fits(folder, torch.cuda.get_device_capability(device)):
        _used.clear()
        return
    _used[:] = [folder]
    # Triton asks at each kernel. Whoever has a manager of their own keeps it.
    os.environ.setdefault("TRITON_CACHE_MANAGER", "aphoton.kernels.triton.cache:PrebuiltCache")
    if not _home_is_writable():
        # FlashInfer writes the sources that it would compile, and a log, before it looks for what is compiled.
        place = Path(tempfile.gettempdir()) / f"aphoton-flashinfer-{os.getuid()}"
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(place))


def begin(folder: Path, arch: str) -> None:
    """Make ``folder`` ready for kernels. Those of an earlier time stay, if they are for the same versions.

    :raises InvalidRequest: when there is something else in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = _read(folder)
    if there is None and any(folder.iterdir()):
        raise InvalidRequest("out", f"must be a new folder, or one of `aphoton prebuild`, and {folder} is neither")
    record: dict[str, object] = {"arch": arch, **_here()}
    if there is not None and any(there.get(name) != record.get(name) for name in ("arch", *HERE, *PACKAGES)):
        shutil.rmtree(folder)
        folder.mkdir()
    _write(folder, record)


def seal(folder: Path, **made_for: object) -> None:
    """Say that all is there: before, nobody uses it.

    :param made_for: for people: nothing compares it.
    """
    record = _read(folder)
    assert record is not None
    _write(folder, {**record, "made_for": made_for})


def _read(folder: Path) -> dict[str, object] | None:
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("arch"), str) else None


def _write(folder: Path, record: dict[str, object]) -> None:
    (folder / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _home_is_writable() -> bool:
    try:
        return os.access(Path.home(), os.W_OK)
    except RuntimeError:  # a user without one
        return False


def _here() -> dict[str, str]:
    """What compiled kernels depend on in this environment; a package without metadata is left out."""
    found = dict(zip(HERE, ("{}.{}".format(*sys.version_info), platform.machine()), strict=True))
    for name, distribution in PACKAGES.items():
        try:
            found[name] = version(distribution).partition("+")[0]  # +cu130, +cpu: the kernels do not call torch
        except PackageNotFoundError:  # put on the path by hand
            continue
    return found


@functools.cache  # so that it warns once
def _fits(folder: Path, capability: tuple[int, int]) -> bool:
    recorded = _read(folder)
    if recorded is None or "made_for" not in recorded:
        raise InvalidRequest(
            VARIABLE, f"{folder} is no folder that `aphoton prebuild` has finished: it has no complete {FILE}"
        )
    wrong = [
        f"{name} {recorded[name]} (here {found})"
        for name, found in _here().items()
        if name in recorded and recorded[name] != found
    ]
    if parse_arch(str(recorded["arch"])) != capability:
        wrong.insert(0, f"compute capability {recorded['arch']} (here {capability[0]}.{capability[1]})")
    if wrong:
        warnings.warn(
            f"{VARIABLE}: {folder} is not used, and kernels are compiled now: it was made for {', '.join(wrong)}; "
            "run `aphoton prebuild` again where the versions are those of the machine that uses it",
            RuntimeWarning,
            stacklevel=2,
        )
    return not wrong

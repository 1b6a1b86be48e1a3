"""`use_prebuilt`: the kernels that `aphoton prebuild` has compiled, for this process."""

import contextlib
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
    # FlashInfer writes the sources that it would compile, and a log, before it looks for what is compiled.
    place = str(Path(tempfile.gettempdir()) / f"aphoton-flashinfer-{os.getuid()}")
    home = _home()
    if home is None:
        os.environ.setdefault("HOME", place)  # it asks for it in any case
    if home is None or not _is_writable(home / ".cache" / "flashinfer" / _here().get("flashinfer", "")):
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", place)


def begin(folder: Path, arch: str, *, cuda: str | None = None) -> None:
    """Make ``folder`` ready for kernels. Those of an earlier time stay, if they are for the same versions, and may be
    used meanwhile.

    :param cuda: version of the CUDA toolkit, whose runtime library FlashInfer's modules want at the run.
    :raises InvalidRequest: when there is something else in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = _read(folder)
    if there is None and any(folder.iterdir()):
        raise InvalidRequest("out", f"must be a new folder, or one of `aphoton prebuild`, and {folder} is neither")
    record: dict[str, object] = {"arch": arch, **({} if cuda is None else {"cuda": cuda}), **_here()}
    if there is not None:
        if all(there.get(name) == record.get(name) for name in ("arch", "cuda", *HERE, *PACKAGES)):
            return
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    _write(folder, record)


def seal(folder: Path, **made_for: object) -> None:
    """Say that all is there: before, nobody uses it. Whoever runs an engine may read it, and need not be who made it.

    :param made_for: for people: nothing compares it.
    """
    record = _read(folder)
    assert record is not None
    _write(folder, {**record, "made_for": made_for})
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(PermissionError):  # somebody else's, of an earlier time
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def _read(folder: Path) -> dict[str, object] | None:
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("arch"), str) else None


def _write(folder: Path, record: dict[str, object]) -> None:
    new = folder / f"{FILE}.new"
    new.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    new.replace(folder / FILE)


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # a user without one
        return None


def _is_writable(place: Path) -> bool:
    """Whether there could be files in it, which may have to be made first."""
    try:
        while not place.exists():
            place = place.parent
    except OSError:  # nobody lets us see
        return False
    return os.access(place, os.W_OK | os.X_OK)


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
    if (folder / FILE).exists() and not os.access(folder / FILE, os.R_OK):
        raise InvalidRequest(VARIABLE, f"{folder / FILE} may not be read by this user")
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
    cuda = recorded.get("cuda")
    if cuda is not None and torch.version.cuda is not None and _major(str(cuda)) != _major(torch.version.cuda):
        wrong.append(f"CUDA {cuda} (here {torch.version.cuda}, which is torch's)")
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


def _major(release: str) -> str:
    return release.partition(".")[0]

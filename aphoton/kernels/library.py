"""`load_library`: the C kernels beside this file, built on first use by the machine's C compiler."""

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
import threading
from pathlib import Path

from aphoton.cachefolder import cache_folder
from aphoton.errors import ModelError

__all__ = ["NativeUnavailable", "load_library", "native_available"]

SOURCE = "native.c"
FLAGS = (
    "-std=gnu11",
    "-O3",
    # Sums of products become fused multiply-adds. Nothing else may be reordered: rows would no longer give the same
    # bits whoever is beside them, and NaN would not be seen.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
)
MACHINE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
"""For this very processor: the first that the compiler knows (Clang on some ARM machines only knows the second)."""

_loaded: dict[tuple[str, ...], ctypes.CDLL] = {}
_lock = threading.Lock()


class NativeUnavailable(ModelError):
    """The native kernels cannot be built here, or cannot run this model. The message says why."""


def native_available() -> str | None:
    """None where the native kernels work, else why not. The first call builds them, which takes seconds."""
    try:
        load_library()
    except NativeUnavailable as error:
        return str(error)
    return None


def load_library(*extra: str) -> ctypes.CDLL:
    """The compiled kernels, from the cache folder if they were built before.

    The file's name follows from the sources, the flags, the compiler and the processor's features, so that none of
    them can change and an old build be used. Any number of threads and processes may call this at once.

    :param extra: further compiler flags, which make a library of its own.
    :raises NativeUnavailable: without a compiler that works; the message has its output.
    """
    with _lock:
        library = _loaded.get(extra)
        if library is None:
            library = _loaded[extra] = _load(extra)
        return library


def _load(extra: tuple[str, ...]) -> ctypes.CDLL:
    if os.name != "posix":
        raise NativeUnavailable("the native kernels need POSIX threads, which this system does not have")
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
    except ValueError as error:
        raise NativeUnavailable(f"$CC cannot be read as a command: {error}") from error
    machine, macros = _machine(compiler)
    flags = [*FLAGS, *machine, *extra]
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".c", ".h"))
    digest = hashlib.sha256("\0".join([*compiler, *flags, macros]).encode())
    for path in sources:
        digest.update(path.read_bytes())
    name = f"native-{digest.hexdigest()[:20]}.so"

    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        if not _private(folder):
            raise PermissionError(f"others can write {folder}")
        if path.exists() and _private(path):
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                pass  # damaged on disk: it is built again
        return _build(compiler, flags, path)
    except OSError:
        # A cache folder that cannot be written, or that others can: build for this process alone. What is loaded needs
        # its file no more.
        with tempfile.TemporaryDirectory(prefix="aphoton-") as own:
            return _build(compiler, flags, Path(own) / name)


def _machine(compiler: list[str]) -> tuple[tuple[str, ...], str]:
    """Flags for this processor, and all macros that the compiler defines with them: its version is among them, and
    every instruction set that it will use."""
    output = ""
    for flags in MACHINE_FLAGS:
        done = _run([*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull])
        if done.returncode == 0:
            return flags, done.stdout
        output = done.stderr
    raise NativeUnavailable(f"the C compiler {shlex.join(compiler)} does not work: {output.strip()}")


def _build(compiler: list[str], flags: list[str], path: Path) -> ctypes.CDLL:
    """:raises OSError: when the folder cannot be written.
    :raises NativeUnavailable: when the compiler fails, or what it made cannot be loaded.
    """
    handle, draft = tempfile.mkstemp(prefix=".native-", suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        done = _run([*compiler, *flags, str(Path(__file__).with_name(SOURCE)), "-o", draft, "-lm"])
        if done.returncode != 0:
            raise NativeUnavailable(f"{shlex.join(compiler)} cannot build the native kernels: {done.stderr.strip()}")
        # Another process may have put the same library there meanwhile: it goes on with its own, which loses its name.
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the native kernels cannot be loaded: {error}") from error


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise NativeUnavailable(
            f"no C compiler: {command[0]!r} cannot be run ({error.strerror}); install one, or name it in $CC"
        ) from error


def _private(path: Path) -> bool:
    """Whether nobody else can write ``path``: what is loaded from it runs with this process's rights."""
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022

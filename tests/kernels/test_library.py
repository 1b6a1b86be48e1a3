"""Building the kernels: once, by whoever comes first, and what is said where that cannot be done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.decoders import needs_compiler

from aphoton.kernels import NativeUnavailable, library, native_available

FAST = "-O0"
"""What these libraries compute does not matter."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and no library in this process yet."""
    monkeypatch.setenv("APHOTON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture
def logged_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a line to the returned file for each library that it makes."""
    log = tmp_path / "log"
    log.touch()
    script = tmp_path / "cc"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-dM*) ;; *) echo built >> {log} ;; esac\nexec {os.environ.get("CC", "cc")} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return log


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", {})


@needs_compiler
def test_built_once(folder: Path, logged_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library.load_library(FAST)
    assert library.load_library(FAST) is first
    forget(monkeypatch)
    library.load_library(FAST)
    assert logged_compiler.read_text().split() == ["built"]
    (built,) = folder.iterdir()
    assert built.name.startswith("native-")


@needs_compiler
def test_other_flags_are_another_library(folder: Path) -> None:
    library.load_library(FAST)
    library.load_library(FAST, "-DLANES=4")
    assert len(list(folder.iterdir())) == 2


@needs_compiler
def test_damaged_file_is_built_again(
    folder: Path, logged_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load_library(FAST)
    (built,) = folder.iterdir()
    # Somewhere else: what this process has loaded it would not read again.
    other = tmp_path / "other"
    other.mkdir()
    (other / built.name).write_bytes(built.read_bytes()[:100])
    monkeypatch.setenv("APHOTON_CACHE", str(other))
    forget(monkeypatch)
    assert library.load_library(FAST).aphoton_forward is not None
    assert (other / built.name).stat().st_size == built.stat().st_size
    assert logged_compiler.read_text().split() == ["built", "built"]


@needs_compiler
def test_without_a_folder_to_write_to(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    assert library.load_library(FAST).aphoton_forward is not None
    assert folder.is_file()


@needs_compiler
def test_processes_build_at_once(folder: Path) -> None:
    program = (
        "import sys; from aphoton.kernels.library import load_library; print('ready', flush=True); sys.stdin.read(1);"
        f"load_library({FAST!r}).aphoton_forward; assert 'torch' not in sys.modules; print('loaded')"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("g")
        process.stdin.flush()
    for process in processes:
        assert process.communicate()[0] == "loaded\n"
        assert process.returncode == 0
    assert len(list(folder.iterdir())) == 1


def test_without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(NativeUnavailable, match="no C compiler: '/nowhere/cc'"):
        library.load_library()
    reason = native_available()
    assert reason is not None
    assert "/nowhere/cc" in reason


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_compiler_that_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(NativeUnavailable, match="does not work: the disk is on fire"):
        library.load_library()


@needs_compiler
def test_sources_that_do_not_compile(folder: Path) -> None:
    with pytest.raises(NativeUnavailable, match=r"cannot build the native kernels:[^$]*LANES"):
        library.load_library(FAST, "-DLANES=broken")
    assert list(folder.iterdir()) == []

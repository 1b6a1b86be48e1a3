"""Kernels that came compiled: when they are used, and what is said when they are not."""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aphoton import InvalidRequest
from aphoton.kernels import prebuilt
from aphoton.kernels.prebuilt import begin, parse_arch, prebuilt_folder, seal, use_prebuilt

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(prebuilt.torch.version, "cuda", "13.0")
    for name in ("TRITON_CACHE_MANAGER", "FLASHINFER_WORKSPACE_BASE", prebuilt.VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is undone, whatever the code does
        monkeypatch.delenv(name)
    prebuilt._fits.cache_clear()
    yield
    prebuilt._used.clear()
    prebuilt._fits.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "kernels"
    begin(place, "9.0a")
    seal(place, model="random:tiny")
    monkeypatch.setenv(prebuilt.VARIABLE, str(place))
    return place


def test_nothing_is_changed_without() -> None:
    use_prebuilt(DEVICE)
    assert prebuilt_folder() is None
    assert "TRITON_CACHE_MANAGER" not in os.environ


def test_a_folder_that_fits_is_used(folder: Path) -> None:
    use_prebuilt(DEVICE)
    assert prebuilt_folder() == folder
    assert os.environ["TRITON_CACHE_MANAGER"].endswith(":PrebuiltCache")
    assert json.loads((folder / "versions.json").read_text())["made_for"] == {"model": "random:tiny"}


@pytest.mark.usefixtures("folder")
def test_what_a_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "mine:Own")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/mine")
    monkeypatch.setattr(prebuilt, "_home", lambda: None)
    monkeypatch.setenv("HOME", "/mine/too")
    use_prebuilt(DEVICE)
    assert os.environ["HOME"] == "/mine/too"
    assert os.environ["TRITON_CACHE_MANAGER"] == "mine:Own"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "/mine"


@pytest.mark.parametrize("made", ["", ".cache", ".cache/flashinfer", ".cache/flashinfer/0.1"])
def test_flashinfer_writes_somewhere_else_where_it_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    monkeypatch.setattr(prebuilt, "version", lambda distribution: "0.1")
    begin(tmp_path / "kernels", "9.0a")
    seal(tmp_path / "kernels")
    monkeypatch.setenv(prebuilt.VARIABLE, str(tmp_path / "kernels"))
    home = tmp_path / "home"
    (home / made).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    use_prebuilt(DEVICE)
    assert "FLASHINFER_WORKSPACE_BASE" not in os.environ
    # Root may write everywhere: the user is one that may write here only to the others.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != home / made)
    use_prebuilt(DEVICE)
    assert "aphoton-flashinfer" in os.environ["FLASHINFER_WORKSPACE_BASE"]


@pytest.mark.usefixtures("folder")
def test_a_user_without_a_home_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer asks for it when it is imported."""

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delenv("HOME")
    use_prebuilt(DEVICE)
    assert os.environ["HOME"] == os.environ["FLASHINFER_WORKSPACE_BASE"]


@pytest.mark.parametrize(("toolkit", "fits"), [("13.2", True), ("12.8", False), (None, True)])
def test_another_cuda_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toolkit: str | None, fits: bool) -> None:
    """FlashInfer's modules want its runtime library, which is torch's at the run."""
    begin(tmp_path / "kernels", "9.0a", cuda=toolkit)
    seal(tmp_path / "kernels")
    monkeypatch.setenv(prebuilt.VARIABLE, str(tmp_path / "kernels"))
    with contextlib.nullcontext() if fits else pytest.warns(RuntimeWarning, match=r"CUDA 12\.8 \(here 13\.0"):
        use_prebuilt(DEVICE)
    assert (prebuilt_folder() is not None) == fits


def test_it_may_be_read_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "kernels"
    before = os.umask(0o077)
    try:
        begin(place, "9.0a")
        (place / "triton").mkdir()
        (place / "triton/kernel").touch()
        seal(place)
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (place, place / "triton", place / "triton/kernel")] == [
        "0o755",
        "0o755",
        "0o644",
    ]
    monkeypatch.setenv(prebuilt.VARIABLE, str(place))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidRequest, match=r"versions\.json may not be read by this user"):
        use_prebuilt(DEVICE)


def test_other_versions_are_told_once_and_not_used(folder: Path) -> None:
    record = json.loads((folder / "versions.json").read_text())
    here, record["torch"] = record["torch"], "1.0"
    (folder / "versions.json").write_text(json.dumps(record))
    with pytest.warns(RuntimeWarning, match=rf"is not used.* torch 1\.0 \(here {here}\)"):
        use_prebuilt(DEVICE)
    assert prebuilt_folder() is None
    assert "TRITON_CACHE_MANAGER" not in os.environ
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_prebuilt(DEVICE)


@pytest.mark.usefixtures("folder")
def test_another_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.warns(RuntimeWarning, match=r"compute capability 9\.0a \(here 8\.9\)"):
        use_prebuilt(DEVICE)
    assert prebuilt_folder() is None


@pytest.mark.parametrize("content", [None, "{}", "[]", "no JSON", '{"arch": "9.0a"}'])
def test_no_such_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    if content is not None:
        (tmp_path / "versions.json").write_text(content)
    monkeypatch.setenv(prebuilt.VARIABLE, str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"APHOTON_KERNELS: .* is no folder that `aphoton prebuild` has finished"):
        use_prebuilt(DEVICE)


def test_architectures() -> None:
    assert [parse_arch(arch) for arch in ("9.0a", "8.0", "12.0f", "10.3a")] == [(9, 0), (8, 0), (12, 0), (10, 3)]
    for wrong in ("sm_90", "9", "90", "9.0b", ""):
        with pytest.raises(InvalidRequest, match="arch: must be a compute capability"):
            parse_arch(wrong)


def test_a_folder_is_added_to_while_nothing_changes(folder: Path) -> None:
    """And used meanwhile, and afterwards, whatever becomes of the addition."""
    (folder / "kernel").touch()
    begin(folder, "9.0a")
    assert (folder / "kernel").exists()
    use_prebuilt(DEVICE)
    assert prebuilt_folder() == folder
    begin(folder, "9.0a", cuda="13.0")
    assert not (folder / "kernel").exists()
    prebuilt._fits.cache_clear()
    with pytest.raises(InvalidRequest, match="has finished"):
        use_prebuilt(DEVICE)


def test_a_folder_of_other_versions_is_made_anew(folder: Path, tmp_path: Path) -> None:
    """It may be a link."""
    (folder / "triton").mkdir()
    (folder / "triton/kernel").touch()
    link = tmp_path / "link"
    link.symlink_to(folder)
    begin(link, "8.0")
    assert [path.name for path in folder.iterdir()] == ["versions.json"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").touch()
    with pytest.raises(InvalidRequest, match="out: must be a new folder"):
        begin(tmp_path, "9.0a")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis"]

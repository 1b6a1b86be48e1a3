"""`check_place`: whether a file can be written, before the work whose result it will hold."""

from pathlib import Path

from aphoton import InvalidRequest

__all__ = ["check_place"]


def check_place(field: str, file: Path | None) -> None:
    """:raises InvalidRequest: when ``file`` is a folder, or its folder is not there. Nothing is written yet."""
    if file is None:
        return
    if file.is_dir():
        raise InvalidRequest(field, f"must be a file, and {file} is a folder")
    if not file.parent.is_dir():
        raise InvalidRequest(field, f"there is no folder {file.parent}")

"""`PrebuiltCache`: Triton's kernels out of the folder of `aphoton prebuild`, which may be anywhere and read-only."""

import functools
import json
import sysconfig
from pathlib import Path

from triton.runtime.cache import CacheManager, FileCacheManager

from aphoton.kernels.prebuilt import prebuilt_folder

__all__ = ["FOLDER", "MODULES", "PrebuiltCache"]

FOLDER = "triton"
"""Of the prebuilt folder: Triton's own cache."""
MODULES = "modules"
"""Of the prebuilt folder: what Triton compiles for the host under keys that tell of the machine's libraries. Its
launchers, before 3.7, have keys as kernels have, and are in `FOLDER`."""


class PrebuiltCache(CacheManager):  # type: ignore[misc]
    """Reads what is there, and leaves all else to Triton's own cache: on a hit nothing is written anywhere.

    Triton's own cache knows its files by absolute paths, and creates a folder before it looks into it.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._key, self._override, self._dump = key, override, dump
        folder = None if override or dump else prebuilt_folder()
        self._places: list[Path] = [] if folder is None else [folder / FOLDER / key, folder / MODULES]

    def get_file(self, filename: str) -> str | None:
        if (found := self._find(filename)) is not None:
            return str(found)
        found = self._own.get_file(filename)
        assert found is None or isinstance(found, str)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        listed = self._find(f"__grp__{filename}")
        if listed is not None:
            names = json.loads(listed.read_text(encoding="utf-8"))["child_paths"]
            files = {name: listed.with_name(name) for name in names}
            if all(file.exists() for file in files.values()):
                return {name: str(file) for name, file in files.items()}
        group = self._own.get_group(filename)
        assert group is None or isinstance(group, dict)
        return group

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        return str(self._own.put(data, filename, binary))

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return str(self._own.put_group(filename, group))

    @functools.cached_property
    def _own(self) -> CacheManager:
        return FileCacheManager(self._key, self._override, self._dump)

    def _find(self, filename: str) -> Path | None:
        host = filename.endswith(sysconfig.get_config_var("EXT_SUFFIX"))
        for place in self._places[: 2 if host else 1]:
            if (place / filename).exists():
                return place / filename
        return None

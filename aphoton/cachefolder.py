"""`cache_folder`: where what is fetched and what is built is kept."""

import os
import sys
import tempfile
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$APHOTON_CACHE``, or ``aphoton`` in the user's cache folder; it need not exist.

    A user without a home (a container with an arbitrary user id) gets a folder of their own among the temporary files.
    """
    if own := os.environ.get("APHOTON_CACHE"):
        return Path(os.path.expanduser(own))  # which leaves a user that does not exist as it is
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "aphoton"
    try:
        home = Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"aphoton-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "aphoton" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "aphoton"
    return home / ".cache" / "aphoton"

"""Where a model's files are: a path, the name ``smollm2``, or an id on the Hugging Face hub."""

import errno
import os
import re
from io import StringIO
from pathlib import Path
from typing import Any

from aphoton.errors import ModelError
from aphoton.models import smollm2
from aphoton.progress import Progress

__all__ = ["resolve"]

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""What of a hub repository is used."""
NOT_FILES = ("*/*", "consolidated*")
"""What of these is not: the same weights in other forms, in folders or under the names of Mistral's own library."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_GGUF = re.compile(rf"({HUB_ID.pattern})/([\w./-]+\.gguf)")


def resolve(model: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The folder or the ``.gguf`` file of a model, fetched if it is not here yet. Blocks; needs no event loop.

    :param model: a folder, a ``.gguf`` file, ``smollm2``, a hub id (``"org/name"``), or a GGUF file on the hub
        (``"org/name/file.gguf"``). What is here counts before what is on the hub, except ``smollm2``, which always
        means the same file: write ``./smollm2`` for a folder of that name.
    :param progress: see `Progress`.
    :raises ModelError: for a model that is not here and cannot be fetched, saying what was looked for.
    """
    if model == smollm2.NAME:
        return smollm2.fetch_smollm2(progress)
    if not os.fspath(model):
        raise ModelError("the model's name is empty")
    path = Path(os.path.expanduser(model))  # which leaves a user that does not exist as it is
    if _exists(path):
        return path
    if isinstance(model, str):
        if found := HUB_GGUF.fullmatch(model):
            return _from_hub(found[1], found[2], progress)
        if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
            return _from_hub(model, None, progress)
    raise ModelError(
        f"there is no file or folder {str(path)!r}; expected a folder with config.json and *.safetensors, a .gguf "
        f"file, a hub id such as 'org/name', the name {smollm2.NAME!r}, or 'random:tiny' and other random shapes"
    )


def _exists(path: Path) -> bool:
    """:raises ModelError: when the system does not say."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # nothing can have that name
            return False
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def _from_hub(repo: str, file: str | None, progress: Progress | None) -> Path:
    """The folder of a repository's files in the hub's own cache, or the one file of it that is asked for.

    :raises ModelError: when it is neither on the hub nor in the cache.
    """
    # These take a while to import, and a model that is here needs none of them.
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo,
                allow_patterns=[file] if file else list(FILES),
                ignore_patterns=None if file else list(NOT_FILES),
                tqdm_class=_bar(repo, progress),
            )
        )
    except GatedRepoError:
        reason = "it is gated: accept its terms on the hub, then log in with `hf auth login`"
    except (RepositoryNotFoundError, HFValidationError):
        reason = "the hub has no model of that name, or it is private and you are not logged in (`hf auth login`)"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and the model is not (or not all of it) in its cache"
    except HfHubHTTPError as error:
        reason = f"the hub answered with status {error.response.status_code}"
    except Exception as error:  # by version, the library fetches with one HTTP client or another
        reason = f"it could not be fetched ({type(error).__name__})"
    else:
        if file and not (folder / file).exists():
            raise ModelError(f"{repo!r} on the Hugging Face hub has no file {file!r}")
        return folder / file if file else folder
    name = f"{repo}/{file}" if file else repo
    raise ModelError(
        f"there is no file or folder {name!r} here, and as a model of the Hugging Face hub {reason}. "
        f"The name {smollm2.NAME!r} needs no hub"
    )


def _bar(repo: str, progress: Progress | None) -> Any:
    """A progress bar class for `huggingface_hub` that draws nothing and calls ``progress``."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # public, but not marked so

    bars: dict[int, tuple[int, int]] = {}

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = {**kwargs, "disable": False, "file": StringIO(), "leave": False}
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            # There is a bar that counts files, and one or two (received, written) that count bytes, by version.
            if progress is not None and self.unit == "B":
                bars[id(self)] = int(self.n), int(self.total or 0)
                done, total = (max(column) for column in zip(*bars.values(), strict=True))
                progress(f"Fetching {repo}", done, total or None)

    return Bar

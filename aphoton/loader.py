"""`load`: from a model's name to a device that runs it, its tokenizer and its chat template."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from aphoton.config import EngineConfig
from aphoton.device.base import Device
from aphoton.device.sim import SimDevice, SimModel
from aphoton.errors import EngineClosed, InvalidRequest
from aphoton.progress import Progress
from aphoton.sampling import GrammarCompiler, GrammarVocabulary
from aphoton.text import ByteTokenizer, ChatTemplate, Tokenizer

__all__ = ["Loaded", "is_virtual", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model ready to run.

    :ivar grammars: compiled for its vocabulary.
    """

    device: Device
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        tokenizer, limits = self.tokenizer, self.device.limits
        vocabulary = GrammarVocabulary(
            tokenizer.vocabulary.pieces,
            special_ids=tokenizer.special_ids,
            eos_ids=limits.eos_token_ids,
            vocab_size=limits.vocab_size,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=False),
        )
        object.__setattr__(self, "grammars", GrammarCompiler(vocabulary))


def load(
    model: str | os.PathLike[str] | SimModel,
    config: EngineConfig,
    progress: Progress | None,
    unwanted: Callable[[], bool] = lambda: False,
) -> Loaded:
    """Fetch and load a model. Blocks for as long as that takes: call it in a thread.

    :param unwanted: asked now and then, while fetching and loading; when it says so, loading ends.
    :raises EngineClosed: then.
    :raises ModelError: when the model cannot be found, read or run.
    :raises InvalidRequest: when a setting does not go with the model or with this machine.
    """
    if is_virtual(model, config):
        return _load_sim(model, config)
    assert not isinstance(model, SimModel)
    # Not at the top: torch takes seconds to import, and ``sim`` needs none.
    from aphoton.device.opening import open_device

    def pause() -> None:
        if unwanted():
            raise EngineClosed("the engine was closed while it started")

    def told(what: str, done: int, total: int | None) -> None:
        pause()
        if progress is not None:
            progress(what, done, total)

    opened = open_device(model, config, told, pause)
    loaded = Loaded(device=opened.device, tokenizer=opened.tokenizer, chat_template=opened.chat_template)
    # Now, while nobody is served: it stops the whole program for up to some tenths of a second.
    loaded.grammars.vocabulary.build()
    return loaded


def is_virtual(model: str | os.PathLike[str] | SimModel, config: EngineConfig) -> bool:
    """Whether it runs on the simulated device, in virtual time."""
    return isinstance(model, SimModel) or config.device == "sim"


def _load_sim(model: str | os.PathLike[str] | SimModel, config: EngineConfig) -> Loaded:
    if not isinstance(model, SimModel):
        if model != "sim":
            raise InvalidRequest("device", f"sim computes nothing: its model is SimModel() or 'sim', not {model!r}")
        model = SimModel()
    if config.device not in ("sim", "auto"):
        raise InvalidRequest("device", f"a SimModel runs on sim, not on {config.device}")
    if config.kv_memory is not None:
        raise InvalidRequest("kv_memory", "sim has no memory: give kv_pages")
    for name in ("dtype", "kernels"):
        if getattr(config, name) != "auto":
            raise InvalidRequest(name, f"sim computes nothing: leave it at 'auto', not {getattr(config, name)!r}")
    if config.max_model_len is not None:
        if config.max_model_len > model.max_model_len:
            raise InvalidRequest("max_model_len", f"must be at most the model's {model.max_model_len}")
        model = msgspec.structs.replace(model, max_model_len=config.max_model_len)
    pages = config.kv_pages or config.max_rows * -(-model.max_model_len // config.page_size)
    try:
        device = SimDevice(model, pages=pages + 1, page_size=config.page_size, max_rows=config.max_rows)
    except MemoryError as error:
        raise InvalidRequest("kv_pages", f"{pages} pages do not fit in this machine's memory") from error
    return Loaded(device=device, tokenizer=ByteTokenizer(model.vocab_size), chat_template=None)

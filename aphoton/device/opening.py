"""`open_device`: a checkpoint, loaded onto the device that the configuration names."""

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from aphoton.config import EngineConfig
from aphoton.device.base import Device
from aphoton.device.cuda.opening import check_cuda, open_cuda
from aphoton.device.opening_cpu import open_cpu
from aphoton.device.source import Source
from aphoton.errors import InvalidRequest, ModelError
from aphoton.memory import trim_memory
from aphoton.models import Checkpoint, Progress, RandomCheckpoint, find_checkpoint
from aphoton.text import ByteTokenizer, ChatTemplate, Tokenizer

__all__ = ["open_device", "open_source"]


class Opened(NamedTuple):
    """A device with a model on it, and the model's way with text."""

    device: Device
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def open_device(
    model: str | os.PathLike[str], config: EngineConfig, progress: Progress | None, pause: Callable[[], None]
) -> Opened:
    """Fetch and load ``model``.

    :param pause: called between two tensors; it raises when nobody wants the model any more.
    :raises ModelError: when the model cannot be found, read or run.
    :raises InvalidRequest: when a setting does not go with the model or with this machine.
    """
    cuda = config.gpu is not None or (
        config.device == "auto" and config.kernels != "native" and torch.cuda.is_available()
    )
    if cuda:
        check_cuda(config)
    checkpoint = find_checkpoint(model, progress)
    source, tokenizer = _source(checkpoint, str(model), config, _pausing(checkpoint.weights(), pause))
    template = _template(checkpoint, tokenizer)
    # From here on the weights' iterator alone holds the checkpoint, and lets it go with the last of them.
    del checkpoint
    trim_memory()  # what the tokenizer took to make, before the weights come
    device = open_cuda(source, config, progress) if cuda else open_cpu(source, config)
    trim_memory()
    return Opened(device, tokenizer, template)


def open_source(model: str | os.PathLike[str], config: EngineConfig, progress: Progress | None) -> Source:
    """What `open_device` would load: for whoever needs to know, but not to run it.

    :raises ModelError: when the model cannot be found or read.
    :raises InvalidRequest: when a setting does not go with the model.
    """
    checkpoint = find_checkpoint(model, progress)
    return _source(checkpoint, str(model), config, iter(()))[0]


def _source(
    checkpoint: Checkpoint, name: str, config: EngineConfig, weights: Iterator[tuple[str, Tensor]]
) -> tuple[Source, Tokenizer]:
    shape = checkpoint.config
    max_model_len = config.max_model_len or shape.max_model_len
    if max_model_len > shape.max_model_len:
        raise InvalidRequest("max_model_len", f"must be at most the model's {shape.max_model_len}, not {max_model_len}")
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        if not isinstance(checkpoint, RandomCheckpoint):
            raise ModelError(f"{name}: has no tokenizer, expected tokenizer.json or the GGUF file's own")
        tokenizer = ByteTokenizer(shape.vocab_size)
    source = Source(
        config=shape,
        weights=weights,
        name=name,
        max_model_len=max_model_len,
        # Each may know an end that the other does not: a configuration's list, a vocabulary's end of turn.
        eos_token_ids=tuple(
            dict.fromkeys(i for i in (*shape.eos_token_ids, *tokenizer.eos_token_ids) if 0 <= i < shape.vocab_size)
        ),
    )
    return source, tokenizer


def _pausing(weights: Iterator[tuple[str, Tensor]], pause: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    def paused(weight: tuple[str, Tensor]) -> tuple[str, Tensor]:
        pause()
        return weight

    return map(paused, weights)  # which holds no weight that it has given


def _template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    if checkpoint.chat_template is None:
        return None
    return ChatTemplate(checkpoint.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

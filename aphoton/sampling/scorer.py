"""`Scorer`: log-probabilities of tokens that are given, where the logits come piece by piece."""

import torch
from torch import Tensor

__all__ = ["Scorer", "logprobs"]


def logprobs(logits: Tensor, tokens: Tensor, wanted: int) -> tuple[Tensor, ...]:
    """Log-probabilities of ``tokens``, and if any are ``wanted``, also ids and log-probabilities of the likeliest.

    :param logits: [n, V], of any dtype: sums are float32.
    :param tokens: [n] ids.
    :returns: [n] float32, and perhaps [n, k] int32 and [n, k] float32, best first, k at most V.
    """
    values = logits.float()
    normalizer = values.logsumexp(dim=1, keepdim=True)
    chosen = (values.gather(1, tokens.long()[:, None]) - normalizer).squeeze(1)
    if not wanted:
        return (chosen,)
    top = values.topk(min(wanted, values.shape[1]), dim=1)
    return chosen, top.indices.int(), top.values - normalizer


class Scorer:
    """Takes the logits at consecutive places, some at a time, so that there need not be memory for all of them."""

    def __init__(self, targets: Tensor, top: int) -> None:
        """:param targets: [m] int32, what follows each place.

        :param top: likeliest tokens to report at each place.
        """
        self._targets = targets
        self._top = top
        self._taken = 0
        self._parts: list[tuple[Tensor, ...]] = []

    def take(self, logits: Tensor) -> None:
        """:param logits: [c, V] at the next c places."""
        end = self._taken + len(logits)
        self._parts.append(logprobs(logits, self._targets[self._taken : end], self._top))
        self._taken = end

    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """[m] float32 of the targets, and [m, k] int32 and [m, k] float32 of the likeliest; k is 0 if none are asked
        for."""
        assert self._taken == len(self._targets), "every place has been taken"
        parts = [torch.cat(part) for part in zip(*self._parts, strict=True)]
        if len(parts) == 3:
            return parts[0], parts[1], parts[2]
        device = self._targets.device
        chosen = parts[0] if parts else torch.empty(0, device=device)
        none = torch.empty(len(chosen), 0, device=device)
        return chosen, none.int(), none

"""`compare`: our rounds beside transformers', round by round."""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from aphoton.cli.figures import Figures

__all__ = ["PeerFigures", "Ratio", "compare"]


class PeerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One request at a time in transformers.

    :ivar tok_s: output tokens a second, prefill included: the median round.
    :ivar tokens_equal: of its tokens, how many come before the first that differs from ours for the same prompt in
        the same dtype. In float32 all should; in fewer bits the order of sums decides near ties.
    """

    dtype: str
    tok_s: float
    tok_s_rounds: list[float]
    tokens: int
    tokens_equal: int


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Our tok/s at one concurrency over theirs with one request: the median of the rounds, which were run in turns.

    :ivar best: each side in its own fastest dtype; else both in the same.
    :ivar ours, theirs: the dtypes.
    """

    best: bool
    depth: int
    concurrency: int
    ours: str
    theirs: str
    ratio: float
    rounds: list[float]


def compare(runs: Sequence[Figures], peers: Mapping[str, PeerFigures]) -> list[Ratio]:
    """Ratios for each dtype that both ran and, when there are several, for the best; by depth and concurrency.

    :param peers: by dtype, not empty.
    """
    ratios = [_ratio(run, peers[run.dtype], best=False) for run in runs if run.dtype in peers]
    if len(peers) == 1:
        return ratios
    peer = max(peers.values(), key=lambda figures: figures.tok_s)
    for depth, concurrency in dict.fromkeys((run.depth, run.concurrency) for run in runs):
        same = [run for run in runs if (run.depth, run.concurrency) == (depth, concurrency)]
        ratios.append(_ratio(max(same, key=lambda run: run.tok_s), peer, best=True))
    return ratios


def _ratio(run: Figures, peer: PeerFigures, *, best: bool) -> Ratio:
    rounds = [ours / theirs for ours, theirs in zip(run.tok_s_rounds, peer.tok_s_rounds, strict=True)]
    return Ratio(
        best=best,
        depth=run.depth,
        concurrency=run.concurrency,
        ours=run.dtype,
        theirs=peer.dtype,
        ratio=median(rounds),
        rounds=rounds,
    )

"""`Figures`: the rounds of one engine at one concurrency, in numbers that a report shows."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import msgspec
import numpy as np

from aphoton.cli.bound import Bound
from aphoton.cli.heartbeat import Heartbeat
from aphoton.cli.workload import Round
from aphoton.observe import HOST_PHASES, Span

__all__ = ["Figures", "Spread", "milliseconds"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How times are distributed, in milliseconds."""

    p50: float
    p99: float
    max: float


def milliseconds(seconds: Sequence[float]) -> Spread | None:
    """The spread of some times; None when there are none."""
    if not len(seconds):
        return None
    times = np.asarray(seconds) * 1e3
    p50, p99 = np.percentile(times, (50, 99)).tolist()
    return Spread(p50=p50, p99=p99, max=float(times.max()))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at one concurrency.

    :ivar dtype, kernels, depth: of the engine; ``dtype`` is empty on ``sim``.
    :ivar variant: what else is different: with the prefix cache or without, the share of constrained requests.
    :ivar tok_s: output tokens a second, prefill included: the median round.
    :ivar tok_s_rounds: each round's.
    :ivar measured_at: whether TTFT and ITL were taken where the consumer reads the stream, or are the engine's own.
    :ivar ttft, itl: over all rounds. ITL at the consumer is between pieces; the engine's is each request's mean.
    :ivar tokens_per_piece: more than 1 when the consumer was slower than the engine. None without streaming.
    :ivar steps: of one round.
    :ivar step_ms: from one decode step of the whole batch to the next, the median. None when there were none.
    :ivar step_mean_ms: the same, the mean: what it takes in the long run, all pauses included.
    :ivar device_ms: the device's work on such a step, the median.
    :ivar phases_ms: the host's time in each phase of a tick, mean over all steps; ``wait`` is the loop's for others.
    :ivar wake_ms: from the end of the device's work on a step to the loop's turn that takes it, the median of the
        steps that were waited for.
    :ivar idle_share: of the device's busy spells, waiting for the host.
    :ivar decode_idle_share: the same between two steps of the whole batch. None when there were none.
    :ivar zombies: rows computed for nothing, all rounds.
    :ivar cpu: cores that this process kept busy.
    :ivar cpu_ms_per_step: its processor time by step, the model's own computation included.
    """

    dtype: str
    kernels: str
    depth: int
    concurrency: int
    tok_s: float
    tok_s_rounds: list[float]
    measured_at: Literal["consumer", "engine"]
    ttft: Spread | None
    itl: Spread | None
    tokens_per_piece: float | None
    steps: int
    step_ms: float | None
    step_mean_ms: float | None
    device_ms: float | None
    phases_ms: dict[str, float]
    wake_ms: float | None
    idle_share: float
    decode_idle_share: float | None
    zombies: int
    cpu: float
    cpu_ms_per_step: float
    heartbeat: Heartbeat | None = None
    bound: Bound | None = None
    variant: str = ""

    @classmethod
    def of(
        cls,
        rounds: Sequence[Round],
        *,
        dtype: str,
        kernels: str,
        depth: int,
        heartbeat: Heartbeat | None = None,
        variant: str = "",
    ) -> "Figures":
        """The figures of at least one round, all at the same concurrency."""
        steps = sum(round_.steps for round_ in rounds)
        tok_s = [round_.tokens / round_.seconds for round_ in rounds]
        phases = {
            phase: sum(getattr(r.after, f"{phase}_time") - getattr(r.before, f"{phase}_time") for r in rounds)
            for phase in HOST_PHASES
        }
        idle = sum(round_.after.device_idle - round_.before.device_idle for round_ in rounds)
        busy = sum(round_.after.device_busy - round_.before.device_busy for round_ in rounds)
        pieces = sum(len(round_.seen_ttft) + len(round_.seen_itl) for round_ in rounds)
        return cls(
            dtype=dtype,
            kernels=kernels,
            depth=depth,
            concurrency=rounds[0].concurrency,
            tok_s=median(tok_s),
            tok_s_rounds=tok_s,
            measured_at="consumer" if rounds[0].at_consumer else "engine",
            ttft=milliseconds([time for round_ in rounds for time in round_.ttft]),
            itl=milliseconds([time for round_ in rounds for time in round_.itl]),
            tokens_per_piece=sum(round_.tokens for round_ in rounds) / pieces if pieces else None,
            steps=rounds[0].steps,
            step_ms=_median_ms(period for round_ in rounds for period in _periods(round_.decode_steps())),
            step_mean_ms=_mean_ms([period for round_ in rounds for period in _periods(round_.decode_steps())]),
            device_ms=_median_ms(span.end - span.begin for round_ in rounds for span in round_.decode_steps()),
            phases_ms={phase: time / steps * 1e3 for phase, time in phases.items()},
            wake_ms=_median_ms(delay for round_ in rounds for delay in _wakes(round_.recording.spans)),
            idle_share=idle / (idle + busy) if idle + busy else 0.0,
            decode_idle_share=_decode_idle(rounds),
            zombies=sum(round_.after.zombies_total - round_.before.zombies_total for round_ in rounds),
            cpu=sum(round_.cpu for round_ in rounds) / sum(round_.real for round_ in rounds),
            cpu_ms_per_step=sum(round_.cpu for round_ in rounds) / steps * 1e3,
            heartbeat=heartbeat,
            variant=variant,
        )


def _median_ms(times: Iterable[float]) -> float | None:
    known = list(times)
    return median(known) * 1e3 if known else None


def _mean_ms(times: Sequence[float]) -> float | None:
    return sum(times) / len(times) * 1e3 if times else None


def _periods(steps: Sequence[Span]) -> Iterable[float]:
    """From each step's beginning to that of the step right behind it."""
    for step, following in pairwise(steps):
        if following.step == step.step + 1:
            yield following.begin - step.begin


def _decode_idle(rounds: Iterable[Round]) -> float | None:
    idle = busy = 0.0
    for round_ in rounds:
        for step, following in pairwise(round_.decode_steps()):
            if following.step == step.step + 1:
                idle += max(0.0, following.begin - step.end)
                busy += following.end - following.begin
    return idle / (idle + busy) if busy else None


def _wakes(spans: Sequence[Span]) -> Iterable[float]:
    """From the device's end to the host's, where the host was waiting by then."""
    ended = {span.step: span.end for span in spans if span.phase == "device"}
    for span in spans:
        if span.phase == "wait" and span.begin < ended.get(span.step, span.begin):
            yield span.end - ended[span.step]

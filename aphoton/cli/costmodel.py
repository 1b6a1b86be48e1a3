"""`CostModel`: the pipeline on the simulated device, beside what theory says of it."""

import anyio
import msgspec

from aphoton import Engine, SimCosts, SimModel
from aphoton.cli.workload import Workload
from aphoton.observe import Recording

__all__ = ["CostModel", "Period", "Tax", "measure_cost_model"]

SWEEP = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Factors of the forward's cost: from a host that is slower than the device to one that is much faster."""
LENGTHS = (8, 32, 128)
EOS = 0


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """Time by token of one stream, in milliseconds.

    :ivar blocking, pipelined: measured at depth 1 and 2.
    :ivar blocking_theory: launch + forward + sampling + copy + commit.
    :ivar device, host: forward + sampling; launch + commit.
    :ivar pipelined_theory: the larger of the two.
    """

    forward: float
    blocking: float
    blocking_theory: float
    pipelined: float
    pipelined_theory: float
    device: float
    host: float


class Tax(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs to see an end only at the commit, when the next step is already in flight.

    The same sequences are run twice at depth 2: ended by an end token, and by ``max_tokens``, which is foreseen.

    :ivar streams: run at once, each taking the next sequence when its last one has ended; lengths are spread by half
        around ``length`` when there are several, so that their ends do not fall together.
    :ivar rows: of the engine. With fewer than streams there is a queue, and who is next waits for the zombie's row.
    :ivar zombie_rows: rows computed for nothing, by token.
    :ivar steps: extra steps, by step.
    :ivar time: extra time, by time.
    :ivar theory: 1 / length for one stream; 0 for a full batch, whose steps run for the other rows anyway; with a
        queue 1 / (length + 1), because a row changes hands in a step less when the end was foreseen.
    """

    streams: int
    rows: int
    length: int
    zombie_rows: float
    steps: float
    time: float
    theory: float


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """:ivar costs: of a step, in milliseconds."""

    costs: dict[str, float]
    periods: list[Period]
    taxes: list[Tax]


async def measure_cost_model(costs: SimCosts, *, streams: int = 32) -> CostModel:
    """:param streams: of the full batch."""
    periods = [await _period(msgspec.structs.replace(costs, forward=costs.forward * factor)) for factor in SWEEP]
    taxes = [await _tax(costs, 1, 2, length) for length in LENGTHS]
    taxes += [await _tax(costs, streams, 2 * streams, length) for length in LENGTHS[:-1]]
    taxes += [await _tax(costs, 2 * streams, streams, length) for length in LENGTHS[:-1]]
    shown = {name: getattr(costs, name) * 1e3 for name in SimCosts.__struct_fields__}
    return CostModel(costs=shown, periods=periods, taxes=taxes)


async def _period(costs: SimCosts) -> Period:
    measured = {}
    for depth in (1, 2):
        async with Engine(SimModel(costs=costs), pipeline_depth=depth, max_rows=1) as engine:
            round_ = await Workload(prompt_tokens=1, output_tokens=200, stream=False).run(engine, 1)
        (measured[depth],) = round_.itl
    device = costs.forward + costs.forward_token + costs.sampling
    host = costs.launch + costs.commit
    blocking = costs.launch + costs.forward + costs.forward_token + costs.sampling + costs.copy + costs.commit
    return Period(
        forward=costs.forward * 1e3,
        blocking=measured[1] * 1e3,
        blocking_theory=blocking * 1e3,
        pipelined=measured[2] * 1e3,
        pipelined_theory=max(device, host) * 1e3,
        device=device * 1e3,
        host=host * 1e3,
    )


def _script(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
    """A prompt is one token: the length at which its sequence ends."""
    return EOS if len(history) >= history[0] else 1


async def _tax(costs: SimCosts, streams: int, rows: int, length: int) -> Tax:
    if streams == 1:
        lengths = [length] * 4
    else:
        spread = range(length // 2, length + length // 2 + 1)
        # Enough that the last few, when the batch is not full any more, count little.
        lengths = [spread[index * 7 % len(spread)] for index in range(streams * max(2, 128 // length))]
    ended = await _run(costs, streams, rows, lengths, foreseen=False)
    foreseen = await _run(costs, streams, rows, lengths, foreseen=True)
    return Tax(
        streams=streams,
        rows=rows,
        length=length,
        zombie_rows=sum(counts.zombies for counts in ended.counts) / sum(lengths),
        steps=len(ended.counts) / len(foreseen.counts) - 1,
        time=ended.seconds / foreseen.seconds - 1,
        theory=1 / length if streams == 1 else 0.0 if rows > streams else 1 / (length + 1),
    )


async def _run(costs: SimCosts, streams: int, rows: int, lengths: list[int], *, foreseen: bool) -> Recording:
    model = SimModel(vocab_size=4096, eos_token_ids=(EOS,), costs=costs, script=_script)
    async with Engine(model, max_rows=rows) as engine:
        recording = Recording(engine.timeline, engine.stats)
        remaining = iter(lengths)

        async def client() -> None:
            for length in remaining:
                done = await engine.generate([length], max_tokens=length if foreseen else None)
                assert done.usage.completion_tokens == length, (done.usage, length)

        async with anyio.create_task_group() as clients:
            for _ in range(streams):
                clients.start_soon(client)
        await engine.aclose(drain=True)  # the last one's zombie is in flight still
        recording.stop()
    return recording

"""`Mode`: a thing that ``aphoton bench`` measures."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from aphoton import EngineConfig, InvalidRequest
from aphoton.cli.interruption import ANSWER, measure_interruptions
from aphoton.cli.machine import Machine
from aphoton.cli.memory import measure_memory
from aphoton.cli.plan import Plan
from aphoton.cli.report import Report
from aphoton.cli.soak import measure_soak
from aphoton.cli.speed import measure_speed
from aphoton.cli.wakeup import measure_wakeups

__all__ = ["ONE", "Mode", "find_mode", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What runs, and what it takes where the options do not say.

    :ivar concurrency: None: as many streams as the engine has rows.
    """

    run: Callable[[Plan], Coroutine[None, None, Report]]
    concurrency: str | None = "1,8,32"
    prompt_tokens: int = 128
    output_tokens: int = 128
    requests: int | None = None


async def _memory(plan: Plan) -> Report:
    machine = Machine.here(plan.device)
    memory = await measure_memory(plan.model, plan.single, plan.workload, plan.concurrency[0])
    return plan.report(machine=machine, memory=memory)


async def _soak(plan: Plan) -> Report:
    assert plan.soak is not None
    streams = plan.concurrency[0]
    machine = Machine.here(plan.device)
    soak = await measure_soak(
        plan.source,
        {"max_rows": streams, **plan.single},
        plan.workload,
        plan.soak,
        concurrency=streams,
        device=plan.device,
    )
    return plan.report(machine=machine, soak=soak)


async def _interruptions(plan: Plan) -> Report:
    assert plan.long_prompts is not None
    machine = Machine.here(plan.device)
    work, streams, length = plan.workload, plan.concurrency[0], plan.long_prompts
    settings = {
        "max_rows": streams + 1,
        "max_model_len": max(length + ANSWER, work.prompt_tokens + work.output_tokens),
        "prefix_cache": False,  # the streams' prompts are the same with each budget
        **plan.single,
    }
    budget = settings.pop("max_step_tokens", EngineConfig().max_step_tokens)
    found = await measure_interruptions(
        plan.model,
        settings,
        work,
        streams,
        length,
        budgets=[budget, length + streams * work.prompt_tokens],
        warmup=plan.warmup,
    )
    return plan.report(machine=machine, interruptions=found)


async def _wakeup(plan: Plan) -> Report:
    machine = Machine.here()
    return plan.report(machine=machine, wakeups=await measure_wakeups())


MODES = {
    "shared_prefix": Mode(run=measure_speed, concurrency="32"),
    "turns": Mode(run=measure_speed, concurrency="8"),
    "constrained": Mode(run=measure_speed, concurrency="32"),
    "long_prompts": Mode(run=_interruptions, concurrency="16"),
    "heartbeat": Mode(run=measure_speed, concurrency="8"),
    "memory": Mode(run=_memory, concurrency="8", prompt_tokens=32, output_tokens=16, requests=2000),
    "wakeup": Mode(run=_wakeup),
    "soak": Mode(run=_soak, concurrency=None, prompt_tokens=1024, output_tokens=256),
}
"""By the option that asks for it. Where two may be given, as with the first two and a heartbeat, the first is meant."""

ONE = ("dtypes", "depths", "concurrency")
"""Where there is one engine at one concurrency, lists of more than one value are refused."""

FIELDS = {"dtypes": "dtype", "depths": "depth", "no_stream": "stream"}
"""What options are called that are not called so in the table below."""


class Refusal(NamedTuple):
    """Where any option of ``by`` is given, none of ``options`` may be."""

    by: tuple[str, ...]
    options: tuple[str, ...]
    why: str


REFUSALS = (
    Refusal(
        ("against", "memory", "wakeup", "soak"),
        ("shared_prefix", "turns", "constrained"),
        "goes with nothing but speed",
    ),
    Refusal(
        ("long_prompts",),
        (
            "against",
            "heartbeat",
            "memory",
            "wakeup",
            "soak",
            "requests",
            "rounds",
            "no_stream",
            "shared_prefix",
            "turns",
            "constrained",
            *ONE,
        ),
        "does not go with --long-prompts, which compares budgets of a step on one engine each",
    ),
    Refusal(("shared_prefix",), ("prefix_cache",), "is what --shared-prefix compares"),
    Refusal(("turns",), ("prefix_cache",), "is what --turns compares"),
    Refusal(
        ("sim",),
        ("against", "heartbeat", "memory", "long_prompts", "dtype", "kernels"),
        "means nothing on the simulated device",
    ),
    Refusal(
        ("wakeup",),
        ("against", "heartbeat", "memory"),
        "does not go with --wakeup, which runs no engine",
    ),
    Refusal(
        ("memory",),
        ("against", "heartbeat", *ONE),
        "does not go with --memory, which runs one engine at one concurrency",
    ),
    Refusal(
        ("soak",),
        ("against", "heartbeat", "memory", "wakeup", "requests", "no_stream", *ONE),
        "does not go with --soak, which sends requests of all kinds to one engine",
    ),
)


def find_mode(asked: Mapping[str, object]) -> Mode:
    """What the options ask for: speed, if nothing else."""
    return next((mode for option, mode in MODES.items() if asked[option]), Mode(run=measure_speed))


def refuse(asked: Mapping[str, object]) -> None:
    """
    :param asked: by option, something true where it was given; of `ONE`, where more than one value was.
    :raises InvalidRequest: for an option that was given and would be ignored.
    """
    for refusal in REFUSALS:
        if any(asked[option] for option in refusal.by):
            for option in refusal.options:
                if asked[option]:
                    raise InvalidRequest(FIELDS.get(option, option), refusal.why)

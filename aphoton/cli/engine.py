"""Engines for commands: their options, and opening one."""

from collections.abc import Callable
from typing import Any

from aphoton import Engine, EngineConfig, InvalidRequest, SimCosts, SimModel
from aphoton.checks import check_float
from aphoton.cli.options import options
from aphoton.cli.terminal import FetchBar

__all__ = ["cost_options", "costs_of", "engine_options", "open_engine"]

ONE_REQUEST = ("max_waiting", "overload")
"""Settings that mean something only where requests come from outside."""
LONGEST_COST = 1e6
"""Milliseconds."""
SHORTEST_STEP = 1e-9
"""Seconds: traces are in whole nanoseconds."""


def engine_options(*leave_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The engine's settings as options of a command, which gets them as ``settings``."""
    return options(
        EngineConfig,
        "settings",
        panel="Engine",
        leave_out=(*ONE_REQUEST, *leave_out),
        names={"pipeline_depth": "depth"},
    )


cost_options = options(SimCosts, "costs", panel="Simulated device (--device sim)", prefix="cost_", unit="ms")
"""What a step of the simulated device costs, in ``costs``."""


def costs_of(costs: dict[str, float], model: str | None, *, sim: bool) -> SimCosts | None:
    """The simulated device's costs; None on another device.

    :raises InvalidRequest: for costs that cannot be, or that nothing would use; for a model that would not run.
    """
    if sim and model not in (None, "sim"):
        raise InvalidRequest("model", f"the simulated device runs a script, not {model!r}: leave the model out")
    for name, value in costs.items():
        if not sim:
            raise InvalidRequest(f"cost_{name}", "only the simulated device has costs: add --device sim")
        check_float(f"cost_{name}", value * 1e3, 0.0, LONGEST_COST)
    if not sim:
        return None
    made = SimCosts(**costs)
    if sum(getattr(made, name) for name in SimCosts.__struct_fields__) < SHORTEST_STEP:
        # Rates and shares are by time: there must be some.
        raise InvalidRequest("cost_forward", "must leave a step some time, when everything else costs nothing")
    return made


async def open_engine(model: str | SimModel, settings: dict[str, Any]) -> Engine:
    """A running engine: close it. A bar is shown while its model is fetched."""
    with FetchBar() as bar:
        return await Engine(model, progress=bar, **settings).start()

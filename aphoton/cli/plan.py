"""`Plan`: what ``aphoton bench`` is to measure."""

from typing import Any

import msgspec

from aphoton import SimCosts, SimModel
from aphoton.cli.report import Report
from aphoton.cli.workload import Workload

__all__ = ["Plan"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the command.

    :ivar costs: None but on the simulated device.
    :ivar concurrency: streams at once, to be compared as dtypes and depths are.
    :ivar constrained: percentages of requests, to be compared.
    :ivar soak: seconds, where that is measured.
    :ivar long_prompts: tokens of one, where they are measured.
    """

    model: str
    settings: dict[str, Any]
    costs: SimCosts | None
    dtypes: list[str]
    depths: list[int]
    concurrency: list[int]
    rounds: int
    warmup: int
    heartbeat: bool
    against: str | None
    workload: Workload
    constrained: list[int]
    soak: float | None
    long_prompts: int | None

    @property
    def source(self) -> str | SimModel:
        """What an engine opens."""
        return self.model if self.costs is None else SimModel(costs=self.costs)

    @property
    def single(self) -> dict[str, Any]:
        """The settings of the only engine."""
        return {**self.settings, "dtype": self.dtypes[0], "pipeline_depth": self.depths[0]}

    @property
    def workloads(self) -> list[tuple[str, Workload]]:
        """What each engine does, by what it is called."""
        if self.constrained == [0]:
            return [("", self.workload)]
        return [
            (f"{share}% constrained", msgspec.structs.replace(self.workload, constrained=share))
            for share in self.constrained
        ]

    @property
    def caches(self) -> list[tuple[str, dict[str, Any]]]:
        """Settings of the prefix cache to be compared, by what they are called.

        Without prompts that begin alike there is none, unless it is asked for: rounds repeat their prompts.
        """
        if not self.workload.reuses:
            return [("", {"prefix_cache": False})]
        return [("no prefix cache", {"prefix_cache": False}), ("prefix cache", {"prefix_cache": True})]

    @property
    def device(self) -> str:
        """Where steps run: ``cpu``, ``cuda``, ``cuda:1`` and so on, or ``sim``."""
        if self.costs is not None:
            return "sim"
        import torch

        device: str = self.settings.get("device", "auto")
        return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    def report(self, **parts: Any) -> Report:
        return Report(
            model=self.model,
            device=self.device,
            settings=self.settings,
            workload=self.workload,
            rounds=self.rounds,
            **parts,
        )

"""The tick: which rows run next, and the order of launch, commit and sampling. Knows no torch and no CUDA."""

from aphoton.scheduler.pipeline import Pipeline
from aphoton.scheduler.scheduler import Scheduler
from aphoton.scheduler.sequence import Sequence
from aphoton.scheduler.waiting import Waiting

__all__ = ["Pipeline", "Scheduler", "Sequence", "Waiting"]

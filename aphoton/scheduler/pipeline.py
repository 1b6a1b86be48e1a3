"""`Pipeline`: the tick. Launch the next forward, commit the last step, then sample what was launched."""

import asyncio
import time
from collections import deque

from aphoton.device.base import Device
from aphoton.observe import Timeline
from aphoton.scheduler.latework import LateWork
from aphoton.scheduler.scheduler import Scheduler
from aphoton.scheduler.slot import Slot
from aphoton.scheduler.step import Step
from aphoton.turns import let_go_first

__all__ = ["Pipeline"]


class Pipeline:
    """Drives a device with what the scheduler chooses, one coroutine per tick.

    At depth 2 a tick that starts with step t in flight launches forward t+1, whose input tokens the device takes from
    where step t's sampling leaves them; then awaits and commits step t while that forward runs; then, with the state
    as of t, launches the sampling of t+1. Depth 1 does the same with nothing in between, for comparison.

    :ivar inflight: steps launched and not committed, oldest first. At most ``depth``.
    """

    def __init__(self, scheduler: Scheduler, device: Device, *, depth: int, timeline: Timeline) -> None:
        self.scheduler = scheduler
        self.device = device
        self.depth = depth
        self.timeline = timeline
        self.slots = (Slot(0), Slot(1))
        self.inflight: deque[Step] = deque()
        self.steps = 0
        self._launches = 0
        self._late = LateWork(scheduler, device)
        self._work = asyncio.Event()
        self._moved = time.monotonic()  # a step was committed, or there was something to do again
        self._closing = False

    def wake(self) -> None:
        """There may be something to do."""
        if not self._work.is_set():
            self._moved = time.monotonic()
            self._work.set()

    @property
    def stalled(self) -> float:
        """Real seconds for which there has been something to do and no step has been committed."""
        return 0.0 if self.scheduler.idle and not self.inflight else time.monotonic() - self._moved

    def close(self) -> None:
        """Let `run` return once nobody waits or runs."""
        self._closing = True
        self._work.set()

    async def run(self) -> None:
        """Tick until closed. Raises what the device raises: no step can follow then."""
        while True:
            if self.inflight or not self.scheduler.idle:
                await self.tick()
                continue
            self.scheduler.check_idle()
            if self._closing:
                return
            self.timeline.rest()
            self._work.clear()
            await self._work.wait()

    async def tick(self) -> None:
        """One turn: launch, commit what came before, finalize the sampling of what was launched."""
        if self.inflight and self.inflight[-1].prompts:
            # A step with prompts takes the device a while: whoever has just got a token goes first.
            await let_go_first()
        step = self._launch()
        if step is None and not self.inflight:
            # It would tick for ever and hold the loop: better dead, with a reason.
            raise RuntimeError("the scheduler is stuck: somebody waits or holds a row, and no step can be launched")
        while self.inflight and self.inflight[0] is not step:
            await self._commit(self.inflight[0])
        if step is not None:
            await self._sample(step)
            if self.depth == 1:
                await self._commit(step)

    def _launch(self) -> Step | None:
        begin = self.device.now()
        slot = self.slots[self._launches % 2]
        chosen = self.scheduler.next_batch()
        if chosen is None:
            return None
        batch, sequences = chosen
        slot.launched()
        self._launches += 1
        step = Step(number=self._launches, slot=slot, batch=batch, sequences=sequences)
        self.device.launch(slot.index, batch)
        self.inflight.append(step)
        assert len(self.inflight) <= self.depth
        self.timeline.add("launch", step.number, begin, self.device.now(), step.rows, step.tokens)
        return step

    async def _commit(self, step: Step) -> None:
        begin = self.device.now()
        results = await self.device.results(step.slot.index)
        ready = self.device.now()
        self.scheduler.commit(step, results)
        self.device.release(step.slot.index)
        step.slot.read()
        self.inflight.popleft()
        self.steps += 1
        self._moved = time.monotonic()
        number, rows, tokens = step.number, step.rows, step.tokens
        self.timeline.add("wait", number, begin, ready, rows, tokens)
        self.timeline.add("commit", number, ready, self.device.now(), rows, tokens)
        self.timeline.add_device(number, results.began, results.ended, rows, tokens)

    async def _sample(self, step: Step) -> None:
        begin = self.device.now()
        late = await self._late.make(step) if self.scheduler.rows.lates and step.batch.late.any() else None
        self.device.sample(step.slot.index, late)
        step.slot.sampled()
        self.timeline.add("sample", step.number, begin, self.device.now(), step.rows, step.tokens)

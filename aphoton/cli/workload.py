"""`Workload`: what a benchmark asks of an engine, and `Round`: what one run of it gave."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import anyio
import msgspec
import numpy as np

from aphoton import Completion, Engine, SamplingParams, Stats
from aphoton.checks import check_int
from aphoton.observe import Recording, Span

__all__ = ["Round", "Workload"]

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]+( [A-Z][a-z]+)*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["small", "old", "tame", "wild"]}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "born", "tags"],
    "additionalProperties": False,
}
"""Of what constrained requests make a list: texts that end by themselves, numbers, fixed words."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of random token ids, each continued greedily for a fixed number of tokens.

    :ivar prompt_tokens, output_tokens: of each request.
    :ivar requests: of a round, run by as many streams as there is concurrency. None: one for each stream.
    :ivar stream: consume token by token, as a chat does; else await completions.
    :ivar shared_prefix: tokens with which all prompts of a round begin.
    :ivar turns: each request is a conversation of so many, whose prompts are all that came before and ``prompt_tokens``
        more. Of several turns, the first has no say in TTFT.
    :ivar constrained: percent of the requests whose output is JSON of a schema, a list that is longer than they are.
    """

    prompt_tokens: int = 128
    output_tokens: int = 128
    requests: int | None = None
    stream: bool = True
    seed: int = 0
    shared_prefix: int = 0
    turns: int = 1
    constrained: int = 0

    def __post_init__(self) -> None:
        check_int("prompt_tokens", self.prompt_tokens, 1)
        check_int("shared_prefix", self.shared_prefix, 0, self.prompt_tokens - 1)
        check_int("turns", self.turns, 1)
        check_int("constrained", self.constrained, 0, 100)
        check_int("output_tokens", self.output_tokens, 1)
        if self.requests is not None:
            check_int("requests", self.requests, 1)
        check_int("seed", self.seed, 0)

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return self.turns * (self.prompt_tokens + self.output_tokens)

    @property
    def reuses(self) -> bool:
        """Prompts begin as others do."""
        return self.shared_prefix > 0 or self.turns > 1

    def prompt(self, index: int, vocab_size: int, turn: int = 0) -> list[int]:
        """The token ids of request ``index``, or of what a turn of it adds: the same whoever runs it."""
        own = np.random.default_rng((self.seed, index, turn) if turn else (self.seed, index))
        count = self.prompt_tokens if turn else self.prompt_tokens - self.shared_prefix
        ids: list[int] = own.integers(vocab_size, size=count).tolist()
        if self.shared_prefix and not turn:
            ids = np.random.default_rng(self.seed).integers(vocab_size, size=self.shared_prefix).tolist() + ids
        return ids

    def afresh(self, number: int) -> "Workload":
        """The same with other prompts, if any are used again: what a cache knows of the last ones helps nobody."""
        return msgspec.structs.replace(self, seed=self.seed + 1000 * number) if self.reuses else self

    def params(self, index: int) -> SamplingParams:
        """What request ``index`` asks for. Those that are constrained are spread evenly."""
        schema = None
        if (index + 1) * self.constrained // 100 > index * self.constrained // 100:
            schema = {"type": "array", "items": RECORD, "minItems": self.output_tokens}
        return SamplingParams(max_tokens=self.output_tokens, ignore_eos=True, json_schema=schema)

    async def run(self, engine: Engine, concurrency: int, *, counts: bool = False) -> "Round":
        """Run a round: ``concurrency`` streams, each taking the next request when its last one has ended.

        :param counts: record the sequences at each commit, too.
        """
        recording = Recording(engine.timeline, engine.stats if counts else None)
        round_ = Round(concurrency=concurrency, virtual=_is_virtual(engine), before=engine.stats(), recording=recording)
        # Made before the time begins: they are the app's, and would hold the loop.
        vocab_size = engine.limits.vocab_size
        asks = iter([(i, self.prompt(i, vocab_size), self.params(i)) for i in range(self.requests or concurrency)])
        cpu, begin = time.process_time(), time.perf_counter()
        try:
            async with anyio.create_task_group() as clients:
                for _ in range(concurrency):
                    clients.start_soon(self._client, engine, asks, round_)
        except ExceptionGroup as group:  # one request's error ends the round: say that one
            raise group.exceptions[0] from None
        finally:
            recording.stop()
        round_.real, round_.cpu = time.perf_counter() - begin, time.process_time() - cpu
        round_.after = engine.stats()
        return round_

    async def _client(
        self, engine: Engine, asks: Iterator[tuple[int, list[int], SamplingParams]], round_: "Round"
    ) -> None:
        for index, prompt, params in asks:
            for turn in range(self.turns):
                if self.stream:
                    done = await _consume(engine, prompt, params, round_, starts=turn > 0 or self.turns == 1)
                else:
                    done = await engine.generate(prompt, params)
                round_.completions[index, turn] = done
                if turn + 1 < self.turns:
                    prompt = [*prompt, *done.token_ids, *self.prompt(index, engine.limits.vocab_size, turn + 1)]


async def _consume(
    engine: Engine, prompt: list[int], params: SamplingParams, round_: "Round", *, starts: bool
) -> Completion:
    """Read a stream to its end, and note when its pieces came; of the first one, if ``starts``."""
    last = begin = time.perf_counter()
    stream = engine.stream(prompt, params)
    first = True
    async for _ in stream:
        now = time.perf_counter()
        if first and not starts:
            pass
        elif first:
            round_.seen_ttft.append(now - begin)
        else:
            round_.seen_itl.append(now - last)
        first, last = False, now
    return await stream.completion()


def _is_virtual(engine: Engine) -> bool:
    return engine.limits.kernels == "script"


@dataclass(slots=True, kw_only=True)
class Round:
    """What was seen of one run.

    :ivar virtual: the device's time is not the consumer's.
    :ivar before, after: the engine.
    :ivar completions: by request and turn.
    :ivar real, cpu: seconds of the wall clock, and of this process on all cores.
    :ivar seen_ttft: seconds to the first piece, one per request that was streamed.
    :ivar seen_itl: seconds between pieces.
    """

    concurrency: int
    virtual: bool
    before: Stats
    recording: Recording
    after: Stats = field(init=False)
    real: float = 0.0
    cpu: float = 0.0
    completions: dict[tuple[int, int], Completion] = field(default_factory=dict)
    seen_ttft: list[float] = field(default_factory=list)
    seen_itl: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first request to the last token, on the clock that the device's times are in."""
        if not self.virtual:
            return self.real
        return self.recording.seconds

    @property
    def tokens(self) -> int:
        return self.after.tokens - self.before.tokens

    @property
    def steps(self) -> int:
        return self.after.steps - self.before.steps

    @property
    def at_consumer(self) -> bool:
        """TTFT and ITL are what a consumer saw; else what the engine noted for each request."""
        return bool(self.seen_ttft) and not self.virtual

    @property
    def ttft(self) -> list[float]:
        if self.at_consumer:
            return self.seen_ttft
        several = any(turn for _, turn in self.completions)
        return [
            done.timings.ttft
            for (_, turn), done in self.completions.items()
            if done.timings.ttft is not None and (turn or not several)
        ]

    @property
    def itl(self) -> list[float]:
        if self.at_consumer:
            return self.seen_itl
        return [done.timings.itl for done in self.completions.values() if done.timings.itl is not None]

    def decode_steps(self) -> list[Span]:
        """The device's work on the steps that only decode, in the widest batch there was."""
        steps = [span for span in self.recording.device if span.tokens == span.rows]
        widest = max((span.rows for span in steps), default=0)
        return [span for span in steps if span.rows == widest]

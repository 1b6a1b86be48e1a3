"""`Report`: everything that a benchmark found, as JSON and as tables."""

from collections.abc import Iterable
from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table

from aphoton.cli.bound import Rates
from aphoton.cli.comparison import PeerFigures, Ratio
from aphoton.cli.costmodel import CostModel
from aphoton.cli.figures import Figures, Spread
from aphoton.cli.heartbeat import Heartbeat
from aphoton.cli.interruption import Interruption
from aphoton.cli.machine import Machine
from aphoton.cli.memory import Memory
from aphoton.cli.soak import Soak
from aphoton.cli.wakeup import Wakeup
from aphoton.cli.workload import Workload
from aphoton.observe.timeline import HOST_PHASES

__all__ = ["Report"]


LEFT = ("engine", "compared", "resident memory", "strategy", "soak")
"""Columns of words."""
WIDTH = 120
"""Columns of a table that goes to no terminal."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `aphoton bench` writes. A part that was not asked for is None or empty.

    :ivar device: where steps ran: ``cpu``, or ``sim``, whose times are virtual.
    :ivar settings: of the engine, as given.
    """

    machine: Machine
    model: str
    device: str
    settings: dict[str, str | int | float]
    workload: Workload
    rounds: int
    runs: list[Figures] = []
    idle_heartbeat: Heartbeat | None = None
    rates: Rates | None = None
    transformers_version: str | None = None
    transformers: list[PeerFigures] = []
    ratios: list[Ratio] = []
    memory: Memory | None = None
    soak: Soak | None = None
    wakeups: list[Wakeup] = []
    interruptions: list[Interruption] = []
    cost_model: CostModel | None = None

    def json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def show(self, console: Console) -> None:
        """Print the tables."""
        if not console.is_terminal:
            console.width = max(console.width, WIDTH)
        console.print(f"[bold]aphoton bench {self.model}[/] on {self.device}", highlight=False)
        console.print(str(self.machine), highlight=False, style="dim", soft_wrap=True)
        if not self.wakeups:
            console.print(self._asked(), highlight=False, style="dim", soft_wrap=True)
        for engine, runs in groupby(self.runs, _engine_in_full):
            self._show_runs(console, engine, list(runs))
        if self.idle_heartbeat is not None:
            _show_heartbeats(console, self.runs, self.idle_heartbeat)
        if self.rates is not None:
            _show_bounds(console, self.runs, self.rates)
        if self.transformers:
            _show_peers(console, self.transformers, self.ratios, self.transformers_version or "")
        if self.memory is not None:
            _show_memory(console, self.memory)
        if self.soak is not None:
            _show_soak(console, self.soak)
        if self.wakeups:
            _show_wakeups(console, self.wakeups)
        if self.interruptions:
            _show_interruptions(console, self.interruptions)
        if self.cost_model is not None:
            _show_cost_model(console, self.cost_model)

    def _asked(self) -> str:
        work = self.workload
        if self.soak is not None:
            text = f"prompts of up to {work.prompt_tokens} random tokens, up to {work.output_tokens} new tokens each"
            text += ", sampled in many ways"
        else:
            text = f"prompts of {work.prompt_tokens} random tokens, {work.output_tokens} new tokens each, greedy"
            text += f", {'streamed' if work.stream else 'awaited'}"
            if work.shared_prefix:
                text += f"; the first {work.shared_prefix} tokens of all prompts of a round are the same"
            if work.turns > 1:
                text += f"; conversations of {work.turns} turns, each with all before it for its prompt"
            if self.memory is None and not self.interruptions:
                text += f"; {self.rounds} round{'s' if self.rounds > 1 else ''}"
        if self.settings:
            text += "; " + ", ".join(f"{name} {value}" for name, value in self.settings.items())
        if self.device == "sim":
            text += "; all times are real" if self.soak else "; all times are virtual, but for the processor's"
        return text

    def _show_runs(self, console: Console, engine: str, runs: list[Figures]) -> None:
        where = "at the consumer" if runs[0].measured_at == "consumer" else "in the engine"
        speed = _table(
            f"{engine}: TTFT and ITL {where}, p50 / p99 in ms",
            ("streams", "tok/s", "(rounds)", "TTFT", "ITL", "CPU cores"),
        )
        for run in runs:
            speed.add_row(
                str(run.concurrency),
                f"{run.tok_s:.1f}",
                f"{min(run.tok_s_rounds):.1f} - {max(run.tok_s_rounds):.1f}",
                _spread(run.ttft),
                _spread(run.itl),
                f"{run.cpu:.2f}",
            )
        _print(console, speed)
        phases = _table(
            f"{engine}: ms per step",
            ("streams", "step", "(mean)", *HOST_PHASES, "device", "idle", "decode idle", "wake-up", "zombies"),
        )
        for run in runs:
            phases.add_row(
                str(run.concurrency),
                _number(run.step_ms, 3),
                _number(run.step_mean_ms, 3),
                *(f"{run.phases_ms[phase]:.3f}" for phase in HOST_PHASES),
                _number(run.device_ms, 3),
                f"{run.idle_share:.2%}",
                "-" if run.decode_idle_share is None else f"{run.decode_idle_share:.2%}",
                _number(run.wake_ms, 3),
                str(run.zombies),
            )
        _print(console, phases)


def _engine_in_full(run: Figures) -> str:
    parts = (run.dtype, f"{run.kernels} kernels", f"depth {run.depth}", run.variant)
    return ", ".join(part for part in parts if part)


def _show_interruptions(console: Console, found: list[Interruption]) -> None:
    table = _table(
        f"{found[0].concurrency} streams, and long prompts that arrive beside them (ms)",
        (
            "tokens in a step",
            "long prompts",
            "ITL p50",
            "p99",
            "max",
            "TTFT of the long",
            "tok/s of the streams",
        ),
    )
    for one in found:
        table.add_row(
            str(one.budget),
            "none" if one.prompts is None else str(one.prompts),
            f"{one.itl.p50:.2f}",
            f"{one.itl.p99:.2f}",
            f"{one.itl.max:.2f}",
            _spread(one.ttft),
            f"{one.tok_s:.0f}",
        )
    _print(console, table)


def _show_heartbeats(console: Console, runs: list[Figures], idle: Heartbeat) -> None:
    table = _table(
        "Heartbeat of 1 ms on the same loop: gaps (ms)", ("engine", "streams", "median", "p99", "max", "beats")
    )
    rows = [("none: an idle loop", "", idle)]
    rows += [(_engine(run), str(run.concurrency), run.heartbeat) for run in runs if run.heartbeat is not None]
    for engine, streams, beat in rows:
        table.add_row(engine, streams, f"{beat.p50:.2f}", f"{beat.p99:.2f}", f"{beat.max:.2f}", str(beat.beats))
    _print(console, table)


def _show_bounds(console: Console, runs: list[Figures], rates: Rates) -> None:
    table = _table(
        f"Bound, measured here: {rates.read_gb_s:.1f} GB/s, {rates.gflop_s:.0f} GFLOP/s; ms per step",
        ("engine", "streams", "to read", "to compute", "step", "bound / step"),
    )
    for run in runs:
        if run.bound is not None:
            table.add_row(
                _engine(run),
                str(run.concurrency),
                f"{run.bound.memory_ms:.2f}",
                f"{run.bound.compute_ms:.2f}",
                _number(run.step_ms, 2),
                f"{run.bound.near:.0%}",
            )
    _print(console, table)


def _show_peers(console: Console, peers: list[PeerFigures], ratios: list[Ratio], version: str) -> None:
    table = _table(
        f"transformers {version}: one request, same weights",
        ("dtype", "tok/s", "(rounds)", "same tokens as ours"),
    )
    for peer in peers:
        table.add_row(
            peer.dtype,
            f"{peer.tok_s:.1f}",
            f"{min(peer.tok_s_rounds):.1f} - {max(peer.tok_s_rounds):.1f}",
            f"{peer.tokens_equal} of {peer.tokens}",
        )
    _print(console, table)
    table = _table(
        "Ours over transformers' one request, median of the rounds",
        ("compared", "depth", "streams", "ours", "theirs", "ratio", "(rounds)"),
    )
    for ratio in ratios:
        table.add_row(
            "best dtype of each" if ratio.best else "same dtype",
            str(ratio.depth),
            str(ratio.concurrency),
            ratio.ours,
            ratio.theirs,
            f"{ratio.ratio:.2f}x",
            f"{min(ratio.rounds):.2f} - {max(ratio.rounds):.2f}",
        )
    _print(console, table)


def _show_memory(console: Console, memory: Memory) -> None:
    table = _table(
        f"{memory.dtype}, {memory.kernels} kernels, depth {memory.depth}: {memory.requests} requests, "
        f"{memory.concurrency} at once",
        ("resident memory", "MiB"),
    )
    table.add_row("before", f"{memory.before:.1f}")
    table.add_row(f"warmed up by {memory.warmup_requests} requests", f"{memory.after_warmup:.1f}")
    for number, sample in enumerate(memory.samples, 1):
        table.add_row(f"after {number * memory.requests // len(memory.samples)} requests", f"{sample:.1f}")
    table.add_row("growth", f"{memory.growth:+.1f}", style="bold")
    table.add_row("first engine, peak", f"{memory.first_peak:.1f}")
    table.add_row("after it was closed", f"{memory.between:.1f}")
    table.add_row("second engine, peak", f"{memory.second_peak:.1f}", style="bold")
    _print(console, table)


def _show_soak(console: Console, soak: Soak) -> None:
    engine = ", ".join(part for part in (soak.dtype, f"{soak.kernels} kernels", f"depth {soak.depth}") if part)
    table = _table(
        f"{engine}: capacity {soak.capacity:.1f} requests a second with {soak.concurrency} at once, "
        f"{soak.rate:.1f} a second sent; times at the consumer",
        ("soak", ""),
    )
    ways = ", ".join(f"{count} by {way}" for way, count in soak.cancelled.items()) or "none"
    cancelled = f"{sum(soak.cancelled.values())} ({ways}; {soak.unseen} before any token)"
    table.add_row("seconds", f"{soak.seconds:.1f}")
    table.add_row("requests", str(soak.requests))
    table.add_row("finished", str(soak.finished))
    table.add_row("cancelled", cancelled)
    table.add_row("failed", str(sum(soak.failed.values())), style="bold red" if soak.failed else None)
    table.add_row("tok/s", f"{soak.tok_s:.1f}")
    table.add_row("TTFT, p50 / p99 in ms", _spread(soak.ttft))
    table.add_row("ITL, p50 / p99 in ms", _spread(soak.itl))
    table.add_row("most running / waiting", f"{soak.most_running} / {soak.most_waiting}")
    left = ("-" if held is None else str(held) for held in (soak.pages_used, soak.rows, soak.zombies))
    table.add_row("pages / rows / zombies held at the end", " / ".join(left), style="bold")
    _print(console, table)
    table = _table("Memory in MiB: this process's, and on a GPU torch's and all in use", ("at, s", *soak.growth))
    for sample in soak.memory:
        table.add_row(f"{sample.at:.1f}", *(f"{value:.1f}" for value in sample.mib.values()))
    table.add_row("growth", *(f"{value:+.1f}" for value in soak.growth.values()), style="bold")
    _print(console, table)


def _show_wakeups(console: Console, wakeups: list[Wakeup]) -> None:
    table = _table(
        "From a CUDA event to the coroutine that awaits it (us), and a 1 ms heartbeat beside it (ms)",
        ("strategy", "device works, ms", "delay p50", "delay p99", "CPU cores", "gap p50", "gap p99"),
    )
    for wakeup in wakeups:
        table.add_row(
            wakeup.strategy,
            f"{wakeup.step_ms:g}",
            f"{wakeup.delay_p50:.0f}",
            f"{wakeup.delay_p99:.0f}",
            f"{wakeup.cpu:.2f}",
            f"{wakeup.gap_p50:.2f}",
            f"{wakeup.gap_p99:.2f}",
        )
    _print(console, table)


def _show_cost_model(console: Console, model: CostModel) -> None:
    costs = ", ".join(f"{name} {value:g}" for name, value in model.costs.items())
    console.print(f"Cost model (virtual ms): {costs}; below the forward varies", highlight=False, soft_wrap=True)
    table = _table(
        "Time by token of one stream",
        ("forward", "blocking", "sum of all", "pipelined", "max(device, host)", "device", "host", "gain"),
    )
    for period in model.periods:
        table.add_row(
            f"{period.forward:.2f}",
            f"{period.blocking:.3f}",
            f"{period.blocking_theory:.3f}",
            f"{period.pipelined:.3f}",
            f"{period.pipelined_theory:.3f}",
            f"{period.device:.3f}",
            f"{period.host:.3f}",
            f"{period.blocking / period.pipelined - 1:+.1%}",
        )
    _print(console, table)
    table = _table(
        "Zombie tax: ends that are seen at the commit, against foreseen ones",
        ("streams", "rows", "length", "theory", "time", "steps", "zombie rows"),
    )
    for tax in model.taxes:
        table.add_row(
            str(tax.streams),
            str(tax.rows),
            f"{tax.length}" if tax.streams == 1 else f"{tax.length // 2} - {tax.length + tax.length // 2}",
            f"{tax.theory:.2%}",
            f"{tax.time:.2%}",
            f"{tax.steps:.2%}",
            f"{tax.zombie_rows:.2%}",
        )
    _print(console, table)


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=True)
    return table


def _print(console: Console, table: Table) -> None:
    """The title in one line, however narrow the table is."""
    title, table.title = str(table.title), None
    console.print(f"\n{title}", style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(table)


def _engine(run: Figures) -> str:
    return f"{run.dtype} {run.kernels}, depth {run.depth}" + (f", {run.variant}" if run.variant else "")


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50:.2f} / {spread.p99:.2f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

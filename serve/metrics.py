"""`EngineMetrics`: what an engine and its requests show to Prometheus; and families of metrics as text.

The names are the same whether the engine runs in the server's process or in a deployment of its own.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aphoton import AphotonError, Engine, Timings, Usage
from aphoton_serve.backend import Family

__all__ = ["EngineMetrics", "exposition", "merge"]

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds: upper bounds of the histograms' buckets."""


class EngineMetrics:
    """The metrics of engines, by model name."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._states = EngineStates()
        self._registry.register(self._states)
        self._requests = Counter(
            "aphoton_requests", "Requests that have ended, by how", ("model", "outcome"), registry=self._registry
        )
        self._queue = Histogram(
            "aphoton_queue_seconds",
            "From submission until a request got a row",
            ("model",),
            buckets=FIRST_TOKEN,
            registry=self._registry,
        )
        self._ttft = Histogram(
            "aphoton_time_to_first_token_seconds",
            "From submission until a request's first token",
            ("model",),
            buckets=FIRST_TOKEN,
            registry=self._registry,
        )
        self._itl = Histogram(
            "aphoton_inter_token_seconds",
            "Mean time between two tokens of a request",
            ("model",),
            buckets=BETWEEN_TOKENS,
            registry=self._registry,
        )
        self._prompt = Counter("aphoton_prompt_tokens", "Tokens of prompts", ("model",), registry=self._registry)
        self._cached = Counter(
            "aphoton_cached_tokens", "Tokens of prompts whose KV was there already", ("model",), registry=self._registry
        )
        self._generated = Counter("aphoton_generated_tokens", "Tokens generated", ("model",), registry=self._registry)

    def add(self, model: str, engine: Engine) -> None:
        """Show this engine's state, too."""
        self._states.engines[model] = engine

    def ended(self, model: str, outcome: str, timings: Timings | None = None, usage: Usage | None = None) -> None:
        """Note a request's end.

        :param outcome: its finish reason, or the name of its error.
        """
        self._requests.labels(model, outcome).inc()
        if timings is not None:
            self._queue.labels(model).observe(timings.queued)
            if timings.ttft is not None:
                self._ttft.labels(model).observe(timings.ttft)
            if timings.itl is not None:
                self._itl.labels(model).observe(timings.itl)
        if usage is not None:
            self._prompt.labels(model).inc(usage.prompt_tokens)
            self._cached.labels(model).inc(usage.cached_tokens)
            self._generated.labels(model).inc(usage.completion_tokens)

    def families(self) -> list[Family]:
        """All of it, as of now."""
        return [
            Family(
                name=metric.name,
                help=metric.documentation,
                type=metric.type,
                samples=[(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
            )
            for metric in self._registry.collect()
        ]


class EngineStates(Collector):
    """Engines' own figures, read when somebody asks."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("aphoton_requests_running", "Sequences that hold a row", labels=["model"])
        waiting = GaugeMetricFamily("aphoton_requests_waiting", "Requests that wait for a row", labels=["model"])
        pages = GaugeMetricFamily("aphoton_kv_pages", "KV pages, by what they hold", labels=["model", "state"])
        used = GaugeMetricFamily(
            "aphoton_kv_use_ratio", "Share of the KV pages that sequences hold, 0 to 1", labels=["model"]
        )
        zombies = GaugeMetricFamily(
            "aphoton_zombies", "Sequences that have ended while a step computes them", labels=["model"]
        )
        wasted = CounterMetricFamily(
            "aphoton_zombie_rows", "Rows computed for a sequence that had ended", labels=["model"]
        )
        steps = CounterMetricFamily("aphoton_steps", "Steps committed", labels=["model"])
        idle = GaugeMetricFamily(
            "aphoton_device_idle_ratio",
            "Share of the busy spells in which the device waited for the host, 0 to 1",
            labels=["model"],
        )
        up = GaugeMetricFamily("aphoton_engine_up", "1 while the engine serves", labels=["model"])
        for model, engine in self.engines.items():
            try:
                stats = engine.stats()
            except AphotonError:  # closed, or dead: it has no figures any more
                up.add_metric([model], 0)
                continue
            up.add_metric([model], 1)
            running.add_metric([model], stats.running)
            waiting.add_metric([model], stats.waiting)
            for state, count in (
                ("free", stats.pages_free),
                ("cached", stats.pages_cached),
                ("used", stats.pages_used),
            ):
                pages.add_metric([model, state], count)
            used.add_metric([model], stats.pages_used / (stats.pages_free + stats.pages_cached + stats.pages_used))
            zombies.add_metric([model], stats.zombies)
            wasted.add_metric([model], stats.zombies_total)
            steps.add_metric([model], stats.steps)
            idle.add_metric([model], stats.device_idle_share)
        yield from (up, running, waiting, pages, used, zombies, wasted, steps, idle)


def merge(sources: Iterable[tuple[dict[str, str], list[Family]]]) -> list[Family]:
    """Families of several sources as one list, with each source's own labels on its samples."""
    merged: dict[str, Family] = {}
    for labels, families in sources:
        for family in families:
            into = merged.setdefault(
                family.name, Family(name=family.name, help=family.help, type=family.type, samples=[])
            )
            into.samples.extend((name, {**given, **labels}, value) for name, given, value in family.samples)
    return list(merged.values())


class _Given(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.type)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def exposition(families: list[Family]) -> bytes:
    """In Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return generate_latest(registry)

"""`RequestSpan`: a request as a span of OpenTelemetry's, where ``opentelemetry-api`` is installed.

The attributes are those of "Semantic conventions for generative client AI spans". Who records them, and where they go,
is OpenTelemetry's own configuration: without its SDK nothing is kept.
"""

import time
from collections.abc import Mapping

from aphoton import Completion
from aphoton_serve.backend import Job

try:
    from opentelemetry import propagate, trace
except ImportError:
    TRACER = None
else:
    TRACER = trace.get_tracer("aphoton.serve")

__all__ = ["RequestSpan", "trace_of"]

SETTINGS = ("max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty")
"""Sampling parameters that the conventions name as they are named here."""
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
"""The conventions have it as a metric. Here an event has its name, and the seconds as an attribute of that name."""


def trace_of(headers: Mapping[str, str]) -> dict[str, str] | None:
    """What says which span a request is a part of (W3C Trace Context); None where nobody traces."""
    if TRACER is None or "traceparent" not in headers:
        return None
    return {name: headers[name] for name in propagate.get_global_textmap().fields if name in headers}


class RequestSpan:
    """Begins with a request to an engine. `ended` or `failed` ends it."""

    def __init__(self, model: str, job: Job) -> None:
        self._span = None
        if TRACER is None:
            return
        self._began = time.time_ns()
        operation = "text_completion" if job.messages is None else "chat"
        self._span = TRACER.start_span(
            f"{operation} {model}",
            propagate.extract(job.trace or {}),
            trace.SpanKind.SERVER,
            start_time=self._began,
        )
        if self._span.is_recording():
            params = job.params
            given = {name: getattr(params, name) for name in SETTINGS}
            given["top_k"] = params.top_k or None
            given["stop_sequences"] = [params.stop] if isinstance(params.stop, str) else [*params.stop] or None
            given["choice.count"] = params.n if params.n > 1 else None
            self._span.set_attributes(
                {
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "aphoton",
                    "gen_ai.request.model": model,
                    "gen_ai.response.model": model,
                    **{f"gen_ai.request.{name}": value for name, value in given.items() if value is not None},
                }
            )

    def ended(self, done: Completion) -> None:
        """With an answer, be it cut short."""
        if self._span is None:
            return
        usage, ttft = done.usage, done.timings.ttft
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [output.finish_reason for output in done.outputs],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        )
        if ttft is not None:
            self._span.add_event(FIRST_TOKEN, {FIRST_TOKEN: ttft}, self._began + round(ttft * 1e9))
        self._span.end()

    def failed(self, outcome: str) -> None:
        """Without one.

        :param outcome: the name of its error, or ``abort`` when it was given up.
        """
        if self._span is None:
            return
        self._span.set_attribute("error.type", outcome)
        self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()

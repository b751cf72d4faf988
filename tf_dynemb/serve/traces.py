"""Spans of requests for an OpenTelemetry collector, if one is configured.

    predict                       the request, with the model, its version, rows and watermark
     ├─ queue                     the wait for a thread
     └─ call                      the call of the model, with the other requests of its batch

The spans are made when a request has ended, and sent in the background. OpenTelemetry's environment
variables say where to (`OTEL_EXPORTER_OTLP_ENDPOINT`), under what name, and which requests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Stages(NamedTuple):
    """The seconds of a request in the queue, and in the call of the model."""

    queue: float
    call: float


class Traces:
    """Sends spans."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider()
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("tf_dynemb.serve")
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def configured() -> Traces | None:
        """Returns where spans go; None: no collector is configured.

        Raises:
            ImportError: OpenTelemetry is not installed.
        """
        return Traces() if any(os.environ.get(name) for name in _ENDPOINTS) else None

    def note(
        self,
        headers: Mapping[str, str],
        began: int,
        ended: int,
        attributes: Mapping[str, Any],
        stages: Stages | None = None,
        error: Exception | None = None,
    ) -> None:
        """Makes the spans of a request.

        Args:
            headers: of the request; `traceparent` names the span that it belongs to.
            began: when it began, in nanoseconds since 1970.
            ended: when it ended.
            attributes: of its span.
            stages: what it waited for, in this order, before it ended; None: it was not called.
            error: why there was no answer.
        """
        from opentelemetry import trace

        parent = self._propagator.extract(dict(headers))
        kind = trace.SpanKind.SERVER
        span = self._tracer.start_span("predict", parent, kind, dict(attributes), start_time=began)
        if error is not None:
            span.set_status(trace.StatusCode.ERROR, str(error))
        if stages is not None:
            inner = trace.set_span_in_context(span)
            at = ended - int(1e9 * (stages.queue + stages.call))
            for name, seconds in stages._asdict().items():
                stage = self._tracer.start_span(name, inner, start_time=at)
                at += int(1e9 * seconds)
                stage.end(at)
        span.end(ended)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

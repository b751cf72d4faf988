"""python -m tf_dynemb.serve: the spans of requests."""

from __future__ import annotations

import gzip
import http.server
import threading
from typing import ClassVar

import pytest
from serve_helpers import (
    ROWS,
    Server,
    client_of,
    v1,
)


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the spans that an OpenTelemetry collector gets."""

    spans: ClassVar[list] = []

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_traces(served):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    Collector.spans.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
        given = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        with Server(f"--model=ctr={served}/models", environment=given) as server:
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            with client_of(server, headers={"traceparent": trace}) as client:
                answer = v1(client, {"instances": ROWS})
                v1(client, {"instances": []})
            assert server.end() == 0
        collector.shutdown()
    named = {}
    for span in Collector.spans:
        named.setdefault(span.name, []).append(span)
    good, bad = named["predict"]
    assert {span.trace_id.hex() for span in Collector.spans} == {trace[3:35]}
    assert good.parent_span_id.hex() == trace[36:52]
    attributes = {each.key: each.value.string_value for each in good.attributes}
    assert attributes["model"] == "ctr"
    assert attributes["x-watermark-id"] == answer.headers["x-watermark-id"]
    (queue,), (call,) = named["queue"], named["call"]
    assert queue.parent_span_id == call.parent_span_id == good.span_id
    assert good.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == call.start_time_unix_nano < call.end_time_unix_nano
    assert call.end_time_unix_nano <= good.end_time_unix_nano
    assert bad.status.code == 2
    assert "an element for each row" in bad.status.message

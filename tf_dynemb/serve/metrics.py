"""What Prometheus reads of a server: requests as they come, and models when it asks.

    request ─> queue ─> call of the model (lookups in tables, and the rest) ─> answer

`LIVE` has histograms and counters that requests change. `ModelsCollector` reads the models at each
scrape: their watermarks, the counters of their tables, and the memory of their files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import psutil
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tf_dynemb.serve.batches import Timing
from tf_dynemb.serve.loaded_model import LoadedModel, Watermark

_SECONDS = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1,
    2,
    4,
    8,
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# By `code`, the name of gRPC's status, for both protocols.
REQUESTS = Counter(
    "tf_dynemb_requests", "Requests by protocol and status", ["model", "protocol", "code"]
)
REQUEST_SECONDS = Histogram(
    "tf_dynemb_request_seconds",
    "Seconds from the last byte of a request to its answer",
    ["model", "protocol"],
    buckets=_SECONDS,
)
IN_FLIGHT = Gauge("tf_dynemb_requests_in_flight", "Requests that are being answered")
_QUEUE_SECONDS = Histogram(
    "tf_dynemb_queue_seconds",
    "Seconds that requests wait for a thread",
    ["model"],
    buckets=_SECONDS,
)
_CALL_SECONDS = Histogram(
    "tf_dynemb_call_seconds", "Seconds of a call of the model", ["model"], buckets=_SECONDS
)
_BATCH_ROWS = Histogram(
    "tf_dynemb_batch_rows", "Rows of a call of the model", ["model"], buckets=_ROWS
)
VERSIONS_LOADED = Counter("tf_dynemb_versions_loaded", "Versions that were loaded", ["model"])
VERSIONS_FAILED = Counter(
    "tf_dynemb_versions_failed", "Attempts to load a version that failed", ["model"]
)
# How long the sizes of mapped files are remembered: the kernel walks through all pages for them.
_FILES_SECONDS = 15.0


def timed(model: str, timing: Timing) -> None:
    """Notes a call of a model."""
    queue = _QUEUE_SECONDS.labels(model)
    for seconds in timing.queued:
        queue.observe(seconds)
    _CALL_SECONDS.labels(model).observe(timing.called)
    _BATCH_ROWS.labels(model).observe(timing.rows)


class Served(Protocol):
    """What the collector asks a served model."""

    name: str

    @property
    def loaded(self) -> LoadedModel | None:
        """The model that answers now."""

    @property
    def version(self) -> str:
        """Its version."""

    def watermark(self) -> Watermark:
        """The snapshot that it serves."""


class ModelsCollector(Collector):
    """Reads the models of a server.

    Args:
        models: the models by name.
    """

    def __init__(self, models: Mapping[str, Served]) -> None:
        self._models = models
        self._files: dict[str, tuple[int, int]] = {}
        self._files_at = -_FILES_SECONDS
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Any]:
        """Names nothing: the models may not be loaded yet."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields the metrics of all models."""
        ready = GaugeMetricFamily(
            "tf_dynemb_model_ready", "1: it answers", labels=["model", "version"]
        )
        watermark = _gauge("watermark", "The tick of the trainer's last batch that is served")
        age = _gauge(
            "watermark_age_seconds", "Seconds since the trainer's last batch that is served"
        )
        failed = _gauge("follow_failed", "1: the next snapshot cannot be applied")
        rows = _gauge("table_rows", "Rows of a table", "table")
        table_bytes = _gauge("table_bytes", "Bytes of a table: its files, and later rows", "table")
        keys = _counter("keys", "Keys that were looked up", "table", "found")
        lookups = _counter("lookup_seconds", "Seconds of lookups, of all threads together", "table")
        applied = _counter("snapshots_applied", "Snapshots that were applied")
        refused = _counter("snapshots_refused", "Errors of snapshots that could not be applied")
        mapped = _gauge("mapped_bytes", "Bytes of mapped files")
        resident = _gauge("resident_bytes", "Bytes of mapped files that are in memory")
        for name, served in list(self._models.items()):
            loaded = served.loaded
            ready.add_metric([name, served.version], loaded is not None)
            if loaded is None:
                continue
            mark = served.watermark()
            failed.add_metric([name], bool(mark.error))
            if mark.id:
                watermark.add_metric([name], mark.watermark)
                age.add_metric([name], time.time() - mark.utc_ns / 1e9)
            tables = loaded.stats()
            for table, stats in tables.items():
                lookups.add_metric([name, table], stats["lookup_ns"] / 1e9)
                rows.add_metric([name, table], stats["size"])
                table_bytes.add_metric([name, table], stats["row_bytes"] + stats["index_bytes"])
                keys.add_metric([name, table, "true"], stats["hits"])
                keys.add_metric([name, table, "false"], stats["misses"])
            for stats in list(tables.values())[:1]:  # all tables of a model have the same
                applied.add_metric([name], stats["snapshots_applied"])
                refused.add_metric([name], stats["snapshots_refused"])
            size, in_memory = self._mapped(loaded)
            mapped.add_metric([name], size)
            resident.add_metric([name], in_memory)
        yield from (ready, watermark, age, failed, applied, refused)
        yield from (rows, table_bytes, keys, lookups, mapped, resident)

    def _mapped(self, loaded: LoadedModel) -> tuple[int, int]:
        """Returns the bytes of a model's mapped files, and those in memory."""
        with self._lock:
            now = time.monotonic()
            if now - self._files_at >= _FILES_SECONDS:
                found = psutil.Process().memory_maps(grouped=True)
                self._files = {each.path: (each.size, each.rss) for each in found}
                self._files_at = now
            files = self._files
        folders = tuple(f"{each.rstrip(os.sep)}{os.sep}" for each in loaded.folders())
        sizes = [size for path, size in files.items() if path.startswith(folders)]
        return sum(each for each, _ in sizes), sum(each for _, each in sizes)


def _gauge(name: str, text: str, *labels: str) -> Any:
    return GaugeMetricFamily(f"tf_dynemb_{name}", text, labels=["model", *labels])


def _counter(name: str, text: str, *labels: str) -> Any:
    return CounterMetricFamily(f"tf_dynemb_{name}", text, labels=["model", *labels])

"""Metrics: a training as numbers that Prometheus reads.

    fit ─> callback ─> _Training <─ collect ─┬─ _Endpoint  <── GET   Prometheus
                           tables            └─ _Pushes    ──> PUT   Push gateway

The numbers are read when they are asked for, in the thread that asks. The counters of tables are
those of `stats()`, which takes the lock of the table as a reader.
"""

from __future__ import annotations

import numbers
import sys
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import keras

from tf_dynemb import communicator
from tf_dynemb._warn import warn
from tf_dynemb.callbacks.publish import Publish
from tf_dynemb.persistence.naming import named_tables, named_variables
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.unwrap import filter_variables

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

_PREFIX = "tf_dynemb_training_"
# Counters of `stats()`, of any table, and of one with files.
_COUNTERS = {
    "hits": "Ids that were looked up and had a row",
    "misses": "Ids that were looked up and had no row",
    "device_hits": "Hits whose row was in GPU memory",
    "inserts": "Rows that were created",
    "evictions": "Rows that a full table evicted",
    "erased": "Rows that were removed by calls",
    "expired": "Rows that were removed because they had expired",
    "refused": "Keys that a full table did not take",
    "unadmitted": "Ids that admission refused",
    "promotions": "Rows that were moved to GPU memory",
    "dropped_gradients": "Gradients of keys that had no row",
    "nonfinite_gradients": "Rows whose gradient had a NaN or an infinity",
}
_FILE_COUNTERS = {
    "file_hits": "Rows that were moved from files to memory",
    "file_rows_written": "Rows that were moved from memory to files",
    "file_reads": "Reads of files",
    "file_writes": "Writes of files",
    "file_bytes_read": "Bytes read from files",
    "file_bytes_written": "Bytes written to files",
    "file_errors": "Errors of files in work that no call waits for",
}
_BYTES = {"index": "index_bytes", "rows": "row_bytes", "files": "file_bytes"}
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_HOST, _JOB, _SECONDS = "127.0.0.1", "training", 15.0
# For one push.
_TIMEOUT_SECONDS = 5.0
# The values of a metric's labels, except `rank`, and a number.
_Samples = Sequence[tuple[list[str], float]]


class Metrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Exposes `fit` to Prometheus: at a port, or through a Push gateway.

    With `port`, there is an HTTP endpoint while `fit` runs. With `gateway`, the numbers are pushed
    every `seconds` and at the end of `fit`, from a thread; a push that fails is a warning, the
    first time, and the training goes on.

    The metrics begin with `tf_dynemb_training_`, and have the label `rank`:

    - `rows`, `load`, `bytes` (`kind`: index, rows, files), and of tables in files `file_rows`;
      and the counters of `DynamicVariable.stats` under the same names, such as `hits_total` and
      `evictions_total`. They have the label `table`, the name of `named_tables`.
    - `steps_total`, the batches that were trained, and the histogram `step_seconds`, which
      includes the time to read the data. Batches without logs do not count, such as those that
      `Publish` skips.
    - `epoch`, from 0; `log` (`name`: loss, val_loss, ...), the last logs; `learning_rate`.
    - `publication_watermark`, `publication_timestamp_seconds` and `publication_seconds` of the
      last publication, and `publication_failed`, if `fit` has a `Publish`.

    Counters go on in the next `fit` with the same callback. On several ranks, each one has this
    callback, and exposes its own numbers: rank r listens on `port` + r, or pushes with the label
    `rank`. If `fit` raises, the endpoint ends when the exception has been handled.

    It needs the package prometheus-client: pip install 'tf_dynemb[metrics]'.

    Example:
    >>> import tensorflow as tf
    >>> import tf_dynemb as de
    >>> model = keras.Sequential([de.layers.Embedding(4), keras.layers.Dense(1)])
    >>> model.compile(de.OptimizerWrapper("adam"), loss="mse")
    >>> ids, labels = tf.constant([[3], [5]]), tf.constant([[[0.0]], [[1.0]]])
    >>> _ = model.fit(ids, labels, callbacks=[Metrics(port=0)], verbose=0)

    Args:
        port: where to listen; 0: a free one.
        gateway: the URL of a Push gateway.
        job: the label `job` in the Push gateway.
        host: the address to listen on; "0.0.0.0": all of the machine's, which lets everyone read
            the numbers who reaches it.
        seconds: the time between two pushes.
        tables: the tables, as for `dump`. None: the tables of the model.

    Raises:
        ImportError: prometheus-client is not installed.
        TypeError: `tables` has an element that is not a DynamicVariable.
        ValueError: both of `port` and `gateway` are given or none, or an argument has another
            value, or has no effect with them.
        OSError: in `fit`: the port is in use.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        gateway: str | None = None,
        job: str = _JOB,
        host: str = _HOST,
        seconds: float = _SECONDS,
        tables: Any = None,
    ) -> None:
        super().__init__()
        if (port is None) == (gateway is None):
            raise ValueError(
                f"Metrics needs either port or gateway, got port={port!r}, gateway={gateway!r}."
            )
        if port is not None:
            _check_port(port)
            if (job, seconds) != (_JOB, _SECONDS):
                raise ValueError(f"job={job!r} and seconds={seconds!r} need gateway.")
        else:
            _check_gateway(gateway, job, seconds)
            if host != _HOST:
                raise ValueError(f"host={host!r} needs port.")
        self._given_port, self._host = port, host
        self._gateway, self._job, self._seconds = gateway or "", job, seconds
        self._given = None if tables is None else _dynamic_only(tables)
        self._training = _Training()
        self._registry, self._step_seconds = _new_registry(self._training)
        self._exposed: _Endpoint | _Pushes | None = None
        self._finalizer: Any = None
        self._batch = -1  # the last one of this epoch
        self._began = 0.0

    @property
    def port(self) -> int | None:
        """The port that it listens on; None: it does not listen."""
        return self._exposed.port if isinstance(self._exposed, _Endpoint) else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to expose the numbers."""
        self._end()  # of a fit that has raised
        training, rank = self._training, communicator.get().rank
        fit = _callbacks_of_fit()
        siblings = [] if fit is None else fit.callbacks
        training.publish = next((each for each in siblings if isinstance(each, Publish)), None)
        training.rank = str(rank)
        training.optimizer = self.model.optimizer
        training.tables = None
        if self.model.built or self._given is not None:
            self._find_tables()
        self._exposed = self._expose(rank)
        if fit is not None:
            # Keras calls no callback if `fit` raises, but its list of callbacks is then freed.
            self._finalizer = weakref.finalize(fit, _close_soon, self._exposed)
            self._finalizer.atexit = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._training.epoch, self._batch = epoch, -1

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the time."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the batch, or the batches if Keras runs several in one call."""
        seconds = time.perf_counter() - self._began
        # Of the last batches of an epoch, Keras says that there are as many as in other calls.
        last = min(batch, (self.params.get("steps") or batch + 1) - 1)
        trained, self._batch = last - self._batch, last
        training = self._training
        if training.tables is None:
            self._find_tables()
        if not logs:
            return
        training.steps += trained
        training.note(logs)
        histogram = self._step_seconds.labels(training.rank)
        for _ in range(trained):
            histogram.observe(seconds / trained)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the logs of the epoch."""
        self._training.note(logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Pushes for the last time, or ends the endpoint."""
        self._end()

    def _find_tables(self) -> None:
        tables = self._given
        if tables is None:
            has_tables = filter_variables(self.model.variables)[0]
            found = named_tables(self.model) if has_tables else {}
            tables = {n: table for n, table in found.items() if isinstance(table, DynamicVariable)}
        self._training.tables = tables

    def _expose(self, rank: int) -> _Endpoint | _Pushes:
        if self._given_port is None:
            registry, gateway, job = self._registry, self._gateway, self._job

            def push() -> None:
                from prometheus_client import push_to_gateway

                labels = {"rank": str(rank)}
                push_to_gateway(gateway, job, registry, labels, timeout=_TIMEOUT_SECONDS)

            return _Pushes(push, self._gateway, self._seconds)
        port = self._given_port and self._given_port + rank
        if port > 65535:
            raise ValueError(
                f"port={self._given_port}: rank {rank} would listen on port {port}, but ports end "
                "at 65535. Pass a lower one."
            )
        return _Endpoint(self._host, port, self._registry)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if self._exposed is not None:
            self._exposed.close()
            self._exposed = None


class _Training:
    """What is exposed. The callback replaces each attribute as a whole, so it needs no lock.

    Attributes:
        rank: the label of all metrics.
        tables: the tables by name; None: they are not known yet.
        optimizer: the optimizer of the model, or None.
        publish: the `Publish` of the same fit, or None.
        steps: the batches that were trained.
        epoch: the current epoch; None: there was none.
        logs: the last logs.
    """

    def __init__(self) -> None:
        self.rank = "0"
        self.tables: Mapping[str, DynamicVariable] | None = None
        self.optimizer: Any = None
        self.publish: Publish | None = None
        self.steps = 0
        self.epoch: int | None = None
        self.logs: Mapping[str, float] = {}

    def note(self, logs: Mapping[str, Any]) -> None:
        """Takes the numbers of some logs."""
        found = {n: float(value) for n, value in logs.items() if isinstance(value, numbers.Real)}
        self.logs = {**self.logs, **found}

    def collect(self) -> Iterator[Any]:
        """Yields all metrics except the histogram."""
        yield from self._tables()
        yield self._counter("steps", "Batches that were trained", [([], self.steps)])
        epoch: _Samples = [] if self.epoch is None else [([], self.epoch)]
        yield self._gauge("epoch", "The current epoch, from 0", epoch)
        logs: _Samples = [([name], value) for name, value in self.logs.items()]
        yield self._gauge("log", "The last loss and metrics", logs, "name")
        # A MultiOptimizer has none.
        rate = getattr(self.optimizer, "learning_rate", None)
        rates: _Samples = [] if rate is None else [([], float(rate))]
        yield self._gauge("learning_rate", "The learning rate", rates)
        yield from self._publications()

    def _tables(self) -> Iterator[Any]:
        tables = dict(self.tables or {})
        stats = {name: table.stats() for name, table in tables.items()}
        in_files = {n: stats[n] for n, table in tables.items() if table.attributes.get("file_path")}

        def each(stats: Mapping[str, Mapping[str, int]], name: str) -> _Samples:
            return [([table], values[name]) for table, values in stats.items()]

        yield self._gauge("rows", "Rows of a table", each(stats, "size"), "table")
        # The index has no slots for rows in files.
        load: _Samples = [
            ([n], (of["size"] - of["file_rows"]) / max(1, of["slots"])) for n, of in stats.items()
        ]
        yield self._gauge("load", "The share of the slots of the index in use", load, "table")
        kinds: _Samples = [
            ([n, kind], of[name]) for n, of in stats.items() for kind, name in _BYTES.items()
        ]
        yield self._gauge("bytes", "Bytes in memory and in files", kinds, "table", "kind")
        for name, text in _COUNTERS.items():
            yield self._counter(name, text, each(stats, name), "table")
        yield self._gauge("file_rows", "Rows in files", each(in_files, "file_rows"), "table")
        for name, text in _FILE_COUNTERS.items():
            yield self._counter(name, text, each(in_files, name), "table")

    def _publications(self) -> Iterator[Any]:
        publish = self.publish
        done = [] if publish is None else list(publish.publications)
        written = [each for each in done if each.watermark is not None]
        resumed = None if publish is None else publish.resumed
        watermark = written[-1].watermark if written else resumed
        known = [] if watermark is None else [watermark]
        text = "The tick of the last batch that is published"
        ticks: _Samples = [([], each.tick) for each in known]
        yield self._gauge("publication_watermark", text, ticks)
        text = "The time of the last batch that is published, since 1970 UTC"
        times: _Samples = [([], each.utc.timestamp()) for each in known]
        yield self._gauge("publication_timestamp_seconds", text, times)
        text = "How long the last publication took"
        seconds: _Samples = [([], each.seconds) for each in written[-1:]]
        yield self._gauge("publication_seconds", text, seconds)
        failed: _Samples = [([], each.watermark is None) for each in done[-1:]]
        yield self._gauge("publication_failed", "1: the last one failed", failed)

    def _gauge(self, name: str, text: str, samples: _Samples, *labels: str) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        return self._family(GaugeMetricFamily, name, text, samples, labels)

    def _counter(self, name: str, text: str, samples: _Samples, *labels: str) -> Any:
        from prometheus_client.core import CounterMetricFamily

        return self._family(CounterMetricFamily, name, text, samples, labels)

    def _family(
        self, kind: Any, name: str, text: str, samples: _Samples, labels: Sequence[str]
    ) -> Any:
        family = kind(_PREFIX + name, text, labels=["rank", *labels])
        for values, number in samples:
            family.add_metric([self.rank, *values], number)
        return family


class _Endpoint:
    """An HTTP server of a registry, with its thread.

    Attributes:
        port: the port; None: it has ended.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            text = f"Metrics cannot listen on {host}:{port}: {error.strerror}"
            raise OSError(error.errno, text) from error
        self.port: int | None = self._server.server_port
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the server, and frees the port."""
        with self._lock:
            if self.port is None:
                return
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self.port = None


class _Pushes:
    """A thread that calls a function now and then, and at its end.

    Args:
        push: the function. If it raises, that is a warning, the first time.
        gateway: where it pushes to, for the warning.
        seconds: the time between two calls.
    """

    def __init__(self, push: Callable[[], None], gateway: str, seconds: float) -> None:
        self._push, self._gateway, self._seconds = push, gateway, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tf_dynemb metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pushes once more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        warned = is_last = False
        while not is_last:
            is_last = self._ended.wait(self._seconds)
            try:
                self._push()
            except Exception as error:
                if not warned:
                    warned = True
                    warn(
                        "Metrics: the training continues, but "
                        f"{self._gateway} did not accept the metrics: {error}"
                    )


def _close_soon(exposed: _Endpoint | _Pushes) -> None:
    """Closes without waiting: the garbage collector may call this in any thread."""
    threading.Thread(target=exposed.close, daemon=True).start()


def _callbacks_of_fit() -> Any:
    """Returns Keras's list of callbacks that called this; None: there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _new_registry(training: _Training) -> tuple[CollectorRegistry, Any]:
    """Returns a registry of the metrics, and the histogram in it."""
    try:
        from prometheus_client import CollectorRegistry, Histogram
    except ImportError as error:
        raise ImportError(
            f"{error}. Metrics needs one more package: pip install 'tf_dynemb[metrics]'."
        ) from error
    registry = CollectorRegistry()
    registry.register(cast("Collector", training))
    histogram = Histogram(
        f"{_PREFIX}step_seconds",
        "Seconds to read and train a batch",
        ["rank"],
        registry=registry,
        buckets=_STEP_SECONDS,
    )
    return registry, histogram


def _dynamic_only(tables: Any) -> dict[str, DynamicVariable]:
    named = named_variables(tables)
    for table in named.values():
        if not isinstance(table, DynamicVariable):
            raise TypeError(f"tables must be DynamicVariables, got {table!r:.120}.")
    return cast("dict[str, DynamicVariable]", named)


def _check_port(port: Any) -> None:
    is_integer = isinstance(port, numbers.Integral) and not isinstance(port, bool)
    if not (is_integer and 0 <= port <= 65535):
        raise ValueError(f"port must be from 0 to 65535, got {port!r}.")


def _check_gateway(gateway: Any, job: Any, seconds: Any) -> None:
    url = urllib.parse.urlsplit(gateway) if isinstance(gateway, str) else None
    if url is None or url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"gateway must be a URL such as http://host:9091, got {gateway!r}.")
    if not isinstance(job, str) or not job:
        raise ValueError(f"job must be a non-empty string, got {job!r}.")
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < threading.TIMEOUT_MAX):
        raise ValueError(f"seconds must be a positive number, got {seconds!r}.")

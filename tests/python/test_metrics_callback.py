"""de.callbacks.Metrics: the numbers at a port and in a Push gateway, during and after `fit`."""

from __future__ import annotations

import gc
import http.server
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
import warnings

import keras
import numpy as np
import pytest
from row_memory import host_memory

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.callbacks import Metrics, Publish

prometheus_parser = pytest.importorskip("prometheus_client.parser")

PREFIX = "tf_dynemb_training_"
# The counters of `stats()` that have metrics of the same names.
COUNTERS = (
    *("hits", "misses", "device_hits", "inserts", "evictions", "erased", "expired", "refused"),
    *("unadmitted", "promotions", "dropped_gradients", "nonfinite_gradients"),
)
FILE_COUNTERS = (
    *("file_hits", "file_rows_written", "file_reads", "file_writes", "file_bytes_read"),
    *("file_bytes_written", "file_errors"),
)


def parse(text):
    """Returns the samples of an exposition, by name and other labels than rank, and the ranks."""
    samples, ranks = {}, set()
    for family in prometheus_parser.text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.name.startswith(PREFIX)
            labels = dict(sample.labels)
            ranks.add(labels.pop("rank"))
            key = (sample.name.removeprefix(PREFIX), *sorted(labels.values()))
            assert key not in samples, "a sample is there twice"
            samples[key] = sample.value
            if family.type == "counter":
                counters.add(key)
    return samples, ranks


counters = set()


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return parse(answer.read().decode())[0]


def refused(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def expected(tables):
    """Returns the samples of some tables by `stats()`."""
    found = {}
    for name, table in tables.items():
        stats = table.stats()
        found["rows", name] = stats["size"]
        found["load", name] = (stats["size"] - stats["file_rows"]) / stats["slots"]
        assert found["load", name] <= 1
        for kind, counter in (("index", "index"), ("rows", "row"), ("files", "file")):
            found[("bytes", *sorted((kind, name)))] = stats[f"{counter}_bytes"]
        in_files = table.attributes.get("file_path")
        for counter in (*COUNTERS, *(FILE_COUNTERS if in_files else ())):
            found[f"{counter}_total", name] = stats[counter]
        if in_files:
            found["file_rows", name] = stats["file_rows"]
    return found


def build(rate=0.5, **options):
    items = de.layers.Embedding(4, name="items", **options)
    layers = [keras.Input([1], dtype="int64"), items, keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(de.OptimizerWrapper(keras.optimizers.SGD(rate)), loss="mse", metrics=["mae"])
    return model


def fit(model, *callbacks, ids=range(12), epochs=2, **options):
    ids = np.asarray(ids)[:, None]
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, **options}
    labels = np.zeros([len(ids), 1])
    return model.fit(ids, labels, epochs=epochs, callbacks=list(callbacks), **options).history


class Scrapes(keras.callbacks.Callback):
    """Scrapes after each batch and at the end of each epoch, and compares with the tables."""

    def __init__(self, metrics):
        super().__init__()
        self.metrics = metrics
        self.batches, self.epochs, self.logs = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(self.compared())

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self.compared())
        self.logs.append(dict(logs))

    def compared(self):
        found, tables = scrape(self.metrics.port), de.named_tables(self.model)
        wanted = expected(tables)
        assert {key: found.get(key) for key in wanted} == wanted
        of_tables = {key for key in found if set(key) & set(tables)}
        assert of_tables == wanted.keys()
        return found


@pytest.mark.parametrize("options", [{}, {"max_capacity": 8}])
def test_each_number_during_fit_is_that_of_the_table(options):
    metrics = Metrics(port=0)
    assert metrics.port is None
    scrapes = Scrapes(metrics)
    history = fit(build(**options), metrics, scrapes)
    last = scrapes.epochs[-1]
    assert last["steps_total",] == last["step_seconds_count",] == 6
    assert [each["steps_total",] for each in scrapes.batches] == [1, 2, 3, 4, 5, 6]
    assert [each["epoch",] for each in scrapes.epochs] == [0, 1]
    assert last["learning_rate",] == 0.5
    for number, found in enumerate(scrapes.epochs):
        assert found["log", "loss"] == scrapes.logs[number]["loss"] == history["loss"][number]
        assert found["log", "mae"] == scrapes.logs[number]["mae"]
    assert last["hits_total", "items/embeddings"] == (0 if options else 12)
    assert last["evictions_total", "items/embeddings"] == (16 if options else 0)
    assert 0 < last["step_seconds_sum",] < 600


def test_counters_are_counters_and_never_decrease():
    counters.clear()
    scrapes = Scrapes(metrics := Metrics(port=0))
    model = build(max_capacity=8)
    fit(model, metrics, scrapes)
    fit(model, metrics, scrapes)
    seen = [*scrapes.batches[:6], scrapes.epochs[1], *scrapes.batches[6:], scrapes.epochs[3]]
    names = {key for key in seen[0] if key[0].endswith(("_total", "_count", "_sum", "_bucket"))}
    assert {f"{name}_total" for name in (*COUNTERS, "steps")} <= {name for name, *_ in names}
    assert {key for key in names if key[0].endswith("_total")} == counters
    for key in names:
        values = [each[key] for each in seen]
        assert values == sorted(values), key
    assert seen[-1]["steps_total",] == 12


def test_scrapes_while_steps_run():
    metrics, ended, seen = Metrics(port=0), threading.Event(), []

    def read():
        while not ended.is_set():
            seen.append(scrape(metrics.port))

    def end(logs):
        ended.set()
        reader.join()

    reader = threading.Thread(target=read)
    # Begins after Metrics, and ends before it.
    begins = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: reader.start())
    ends = keras.callbacks.LambdaCallback(on_train_end=end)
    ids = np.random.default_rng(0).integers(0, 200, 800)
    fit(build(max_capacity=64), ends, metrics, begins, ids=ids, epochs=3)
    assert len([each for each in seen if 0 < each["steps_total",] < 600]) > 5
    for name in ("inserts_total", "evictions_total"):
        values = [each[name, "items/embeddings"] for each in seen]
        assert values == sorted(values)
        assert len(set(values)) > 3
    assert max(each["rows", "items/embeddings"] for each in seen) <= 64


def test_tables_in_files(tmp_path):
    memory = host_memory(100, 1024)
    files = {"var_type": "file", "file_path": tmp_path, "max_dram_for_vectors": memory}
    items = de.layers.Embedding(1024, name="items", **files)
    layers = [keras.Input([1], dtype="int64"), items, keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(de.OptimizerWrapper("sgd"), loss="mse")
    scrapes = Scrapes(metrics := Metrics(port=0))
    # Files change in the background, so only the last comparison waits for them.
    scrapes.on_train_batch_end = lambda batch, logs=None: None
    ids = np.concatenate([np.arange(2000), np.arange(2000)])
    fit(model, metrics, scrapes, ids=ids, epochs=1, batch_size=50)
    found = scrapes.epochs[0]
    for name in (*FILE_COUNTERS[:-1], "file_hits"):
        suffix = "" if name == "file_rows" else "_total"
        assert found[f"{name}{suffix}", "items/embeddings"] > 0, name
    assert found["file_rows", "items/embeddings"] > 1800


def test_an_unbuilt_model_and_chosen_tables():
    chosen = de.DynamicVariable(2, name="chosen")
    chosen.lookup([1, 2, 3])
    model = keras.Sequential([de.layers.Embedding(4), keras.layers.Flatten()])
    model.compile(de.OptimizerWrapper("sgd"), loss="mse")
    seen = []
    for tables in (None, {"mine": chosen}, [chosen]):
        metrics = Metrics(port=0, tables=tables)
        look = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs, m=metrics: seen.append(scrape(m.port)),
            on_epoch_end=lambda epoch, logs, m=metrics: seen.append(scrape(m.port)),
        )
        model.fit(np.arange(8)[:, None], np.zeros([8, 4]), callbacks=[metrics, look], verbose=0)
    rows = [{key[1]: n for key, n in each.items() if key[0] == "rows"} for each in seen]
    assert rows == [{}, {"layers/0": 8}, {"mine": 3}, {"mine": 3}, {"chosen": 3}, {"chosen": 3}]


def test_models_without_tables_optimizers_with_schedules_and_without_rates():
    seen = []
    dense = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizers = [keras.optimizers.SGD(schedule)]
    if hasattr(keras.optimizers, "MultiOptimizer"):
        optimizers.append(keras.optimizers.MultiOptimizer(lambda v: keras.optimizers.SGD(0.1)))
    for optimizer in optimizers:
        dense.compile(optimizer, loss="mse")
        metrics = Metrics(port=0)
        look = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, m=metrics: seen.append(scrape(m.port))
        )
        fit(dense, metrics, look, epochs=1)
    assert seen[0]["learning_rate",] == 0.5**4  # after three steps
    assert [key for key in seen[-1] if key[0] == "rows"] == []
    assert [("learning_rate",) in each for each in seen] == [True, False][: len(seen)]


def test_batches_that_keras_runs_in_one_call_count():
    model = build()
    model.compile(de.OptimizerWrapper("sgd"), loss="mse", steps_per_execution=4)
    scrapes = Scrapes(metrics := Metrics(port=0))
    fit(model, metrics, scrapes, ids=range(40))
    found = scrapes.epochs[-1]
    assert found["steps_total",] == found["step_seconds_count",] == 20


def test_publications(tmp_path):
    model, seen = build(), []
    publish = Publish(tmp_path / "chain", resume=True)
    metrics = Metrics(port=0)
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(scrape(metrics.port)),
        on_epoch_end=lambda epoch, logs: seen.append(scrape(metrics.port)),
    )
    fit(model, metrics, publish, look)
    for found, done in zip(seen, (0, 1, 1, 2), strict=True):
        published = publish.publications[done]
        assert found["publication_watermark",] == published.watermark.tick
        utc = published.watermark.utc.timestamp()
        assert found["publication_timestamp_seconds",] == pytest.approx(utc, abs=1e-3)
        assert found["publication_seconds",] == published.seconds
        assert found["publication_failed",] == 0

    # Resumed in the second epoch, of whose three batches two are not trained again.
    seen.clear()
    publish = Publish(tmp_path / "chain", resume=True, raise_errors=False)

    def fail(*_):
        raise OSError("full")

    broken = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(publish, "_write", fail)
    )
    with pytest.warns(UserWarning, match="full"):
        fit(model, metrics, publish, broken, look, epochs=3)
    assert seen[0]["publication_watermark",] == publish.resumed.tick
    assert ("publication_seconds",) not in seen[0]
    assert seen[1]["publication_watermark",] == publish.resumed.tick
    assert seen[1]["publication_failed",] == 1
    assert seen[1]["steps_total",] == 6 + 3

    fit(model, metrics, look)
    assert not [key for key in seen[-1] if "publication" in key[0]]


def test_batches_that_are_not_trained_again_do_not_count(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    model = build()
    fit(model, Publish(tmp_path / "chain", every=1, resume=True), Stop(), epochs=1)
    scrapes = Scrapes(metrics := Metrics(port=0))
    fit(model, Publish(tmp_path / "chain", resume=True), metrics, scrapes, epochs=1)
    assert scrapes.epochs[0]["steps_total",] == scrapes.epochs[0]["step_seconds_count",] == 1


def test_the_endpoint_ends_with_fit_and_begins_again():
    model, ports = build(), []
    metrics = Metrics(port=0)
    look = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: ports.append(metrics.port))
    for _ in range(2):
        fit(model, metrics, look)
        assert metrics.port is None
        assert refused(ports[-1])
    assert len(ports) == 2
    again = Metrics(ports[0])
    look = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: ports.append(again.port))
    for _ in range(2):
        fit(model, again, look)
    assert ports[2:] == [ports[0], ports[0]]


@pytest.mark.parametrize("handled", [True, False])
def test_a_fit_that_raises(handled):
    ports = []

    class Raise(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ports.append(metrics.port)
            if len(ports) == 2:
                raise RuntimeError("no luck")

    model = build()
    keras.config.disable_traceback_filtering()
    try:
        with pytest.raises(RuntimeError, match="no luck") as caught:
            fit(model, metrics := Metrics(port=0), Raise())
    finally:
        keras.config.enable_traceback_filtering()
    assert not refused(ports[0])  # the exception still holds the frame of fit
    if handled:
        del caught
        gc.collect()
        deadline = time.monotonic() + 20
        while metrics.port is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert metrics.port is None
        assert refused(ports[0])
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(scrape(metrics.port))
    )
    fit(model, metrics, look, epochs=1)
    assert seen[0]["steps_total",] == 2 + 3
    assert refused(ports[0])
    assert metrics.port is None


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        metrics = Metrics(port)
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
            fit(build(), metrics)
        assert metrics.port is None
    fit(build(), metrics)


class Rank(communicator.Communicator):
    """One of several ranks that send each other nothing."""

    local_rank = 0

    def __init__(self, rank):
        self.rank, self.size = rank, 4

    def __getattr__(self, name):
        raise NotImplementedError(name)

    alltoall = allgather = broadcast = None


Rank.__abstractmethods__ = frozenset()


def test_each_rank_has_a_port_and_a_label(monkeypatch):
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    texts = []

    def look(epoch, logs):
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 2}/metrics", timeout=10) as answer:
            texts.append(answer.read().decode())

    callbacks = [Metrics(port), keras.callbacks.LambdaCallback(on_epoch_end=look)]
    monkeypatch.setattr(communicator, "get", lambda: Rank(2))
    fit(model, *callbacks, epochs=1)
    samples, ranks = parse(texts[0])
    assert ranks == {"2"}
    assert samples["steps_total",] == 3
    with pytest.raises(ValueError, match="port=65535: rank 2 would listen on port 65537"):
        fit(model, Metrics(65535))


class Gateway:
    """A Push gateway that remembers what it is sent.

    Attributes:
        url: its URL.
        pushes: the method, the path and the body of each request.
        status: what it answers.
        wait: an event that it waits for before it answers.
    """

    def __init__(self, status=200):
        gateway = self
        self.pushes, self.status, self.wait = [], status, threading.Event()
        self.wait.set()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PUT(self):
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                gateway.pushes.append((self.command, self.path, body))
                gateway.wait.wait(60)
                self.send_response(gateway.status)
                self.end_headers()

            do_POST = do_PUT  # noqa: N815

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait.set()
        self.server.shutdown()
        self.server.server_close()


def pause(seconds):
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(seconds)
    )


def test_a_gateway_gets_the_numbers():
    model = build()
    with Gateway() as gateway, warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = Metrics(gateway=gateway.url, job="ctr", seconds=0.02)
        history = fit(model, metrics, pause(0.05))
        assert metrics.port is None
        count = len(gateway.pushes)
        time.sleep(0.2)
        assert len(gateway.pushes) == count, "it pushes after the end"
        fit(model, metrics, epochs=1)
    assert count > 3
    assert {push[:2] for push in gateway.pushes} == {("PUT", "/metrics/job/ctr/rank/0")}
    pushes = [parse(body) for _, _, body in gateway.pushes]
    steps = [samples["steps_total",] for samples, _ in pushes]
    assert steps == sorted(steps)
    assert steps[0] < steps[count - 1] == 6 < steps[-1] == 9
    first_fit = pushes[count - 1][0]
    assert first_fit["log", "loss"] == history["loss"][-1]
    last, ranks = pushes[-1]
    wanted = expected(de.named_tables(model))
    assert {key: last.get(key) for key in wanted} == wanted
    assert ranks == {"0"}


def test_the_last_push_is_at_the_end_of_fit():
    with Gateway() as gateway:
        ids, labels = np.arange(4)[:, None], np.zeros([4, 1])
        metrics = Metrics(gateway=gateway.url, seconds=1000)
        history = fit(build(), metrics, validation_data=(ids, labels))
    ((_, _, body),) = gateway.pushes
    samples, _ = parse(body)
    assert samples["steps_total",] == 6
    assert samples["log", "val_loss"] == history["val_loss"][-1]


@pytest.mark.parametrize("fault", ["answers 500", "does not listen", "does not answer"])
def test_a_gateway_that_fails_warns_once(fault, monkeypatch):
    monkeypatch.setattr("tf_dynemb.callbacks.metrics._TIMEOUT_SECONDS", 0.05)
    model = build()
    with Gateway(500 if fault == "answers 500" else 200) as gateway:
        if fault == "does not listen":
            gateway.server.server_close()
        elif fault == "does not answer":
            gateway.wait.clear()
        metrics = Metrics(gateway=gateway.url, seconds=0.01)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            history = fit(model, metrics, pause(0.1))
    texts = [str(each.message) for each in found if "Metrics" in str(each.message)]
    assert len(texts) == 1
    assert gateway.url in texts[0]
    assert "the training continues" in texts[0]
    assert len(history["loss"]) == 2


def test_a_gateway_that_is_late_gets_the_last_numbers():
    model = build()
    with Gateway(500) as gateway:
        repair = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(gateway, "status", 200)
        )
        with pytest.warns(UserWarning, match="did not accept the metrics"):
            fit(model, Metrics(gateway=gateway.url, seconds=0.01), pause(0.1), repair)
        assert parse(gateway.pushes[-1][2])[0]["steps_total",] == 6


def test_a_fit_that_raises_ends_the_pushes():
    def fail(*_):
        raise RuntimeError("no luck")

    with Gateway() as gateway:
        metrics = Metrics(gateway=gateway.url, seconds=0.01)
        with pytest.raises(RuntimeError, match="no luck"):
            fit(build(), metrics, keras.callbacks.LambdaCallback(on_epoch_end=fail))
        gc.collect()
        deadline = time.monotonic() + 20
        while "tf_dynemb metrics" in {t.name for t in threading.enumerate()}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert parse(gateway.pushes[-1][2])[0]["steps_total",] == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "needs either port or gateway, got port=None, gateway=None"),
        ({"port": 1, "gateway": "http://a"}, "needs either port or gateway"),
        ({"port": -1}, "port must be from 0 to 65535, got -1"),
        ({"port": 65536}, "port must be"),
        ({"port": "9000"}, "port must be from 0 to 65535, got '9000'"),
        ({"port": True}, "port must be"),
        ({"port": 0, "seconds": 3}, "seconds=3 need gateway"),
        ({"port": 0, "job": "ctr"}, "job='ctr' and"),
        ({"gateway": "http://a", "host": "0.0.0.0"}, "host='0.0.0.0' needs port"),
        ({"gateway": ""}, "gateway must be a URL such as http://host:9091, got ''"),
        ({"gateway": "host:9091"}, "gateway must be a URL"),
        ({"gateway": "ftp://host"}, "gateway must be a URL"),
        ({"gateway": 9091}, "gateway must be a URL"),
        ({"gateway": "http://a", "job": ""}, "job must be a non-empty string, got ''"),
        ({"gateway": "http://a", "seconds": 0}, "seconds must be a positive number, got 0"),
        ({"gateway": "http://a", "seconds": float("nan")}, "seconds must be a positive"),
        ({"gateway": "http://a", "seconds": float("inf")}, "seconds must be a positive"),
        ({"gateway": "http://a", "seconds": "3"}, "seconds must be a positive number, got '3'"),
        ({"port": 0, "tables": []}, "is empty"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Metrics(**arguments)


def test_wrong_tables():
    dense = keras.Variable(np.zeros([2, 2]), name="dense")
    with pytest.raises(TypeError, match="DynamicVariable"):
        Metrics(0, tables=[dense])
    with pytest.raises(TypeError, match="DynamicVariable"):
        Metrics(0, tables=["items"])
    with pytest.raises(TypeError, match="tables must be DynamicVariables"):
        Metrics(0, tables=[de.Variable(np.zeros([2, 2], np.float32), name="static")])
    pair = [de.DynamicVariable(2, name="pair"), de.DynamicVariable(2, name="pair")]
    with pytest.raises(ValueError, match="named 'pair'"):
        Metrics(0, tables=pair)
    Metrics(0, tables=dict(zip("ab", pair, strict=True)))


def test_the_package_is_imported_when_it_is_needed():
    code = """
    import sys
    import keras, tf_dynemb as de

    de.callbacks.Metrics, de.layers
    assert not [name for name in sys.modules if name.startswith("prometheus_client")]
    sys.modules["prometheus_client"] = None
    try:
        de.callbacks.Metrics(0)
    except ImportError as error:
        assert "pip install 'tf_dynemb[metrics]'" in str(error), error
    else:
        raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)

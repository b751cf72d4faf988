"""The server (`python -m tf_dynemb.serve`): latency and throughput, beside direct calls.

    python -m benchmarks.server

A DLRM with 26 tables, requests of 64 samples, and clients on the same machine: `wrk` for REST,
a Python client for gRPC, which needs a good part of the processor itself. The same model with
`keras.layers.Embedding` is served beside it. Direct calls are calls of the SavedModel's signature
in another Python process. The forms take turns of a second, and the ratios are medians of those of
the turns. The server is measured again while a trainer's deltas are applied.

Needs `wrk` (apt-get install wrk).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FEATURES, DENSE, SAMPLES, DIM = 26, 13, 64, 16
REQUESTS = 64  # different ones
MODELS = ("tf_dynemb", "Keras")
WRK = """
local bodies, number = {}, 0
for i = 1, REQUESTS do
  local file = assert(io.open("FOLDER/" .. i - 1, "rb"))
  bodies[i] = file:read("*a")
  file:close()
end
local headers = {}
for name, value in string.gmatch(HEADERS, "([^:;]+):([^;]+)") do headers[name] = value end
request = function()
  number = number % REQUESTS + 1
  return wrk.format("POST", nil, headers, bodies[number])
end
done = function(summary, latency, requests)
  io.write(string.format("FIGURES %f %f %f %d %d\\n",
    latency:percentile(50), latency:percentile(99),
    summary.requests / summary.duration * 1e6, summary.requests,
    summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout))
end
"""


class Figures(NamedTuple):
    """Latencies in milliseconds, and answers per second."""

    p50: float
    p99: float
    per_second: float


def batches(vocabulary: int, seed: int = 0) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Returns requests; ids come by a power law."""
    rng = np.random.default_rng(seed)
    return [
        {
            "ids": (vocabulary * rng.random([SAMPLES, FEATURES]) ** 3).astype(np.int64),
            "features": rng.random([SAMPLES, DENSE]).astype(np.float32),
        }
        for _ in range(REQUESTS)
    ]


def build(kind: str, vocabulary: int) -> Any:
    """Returns a DLRM whose tables are ours, or Keras's."""
    import keras

    import tf_dynemb as de

    features = keras.Input([DENSE], name="features")
    ids = keras.Input([FEATURES], dtype="int64", name="ids")
    x: Any = features
    for units in (512, 256, 64, DIM):
        x = keras.layers.Dense(units, "relu")(x)
    if kind == "Keras":
        vectors = [
            keras.layers.Embedding(vocabulary, DIM, name=f"table_{i}")(ids[:, i])
            for i in range(FEATURES)
        ]
        vectors = keras.ops.stack(vectors, 1)
    else:
        vectors = de.layers.MultiTableEmbedding(
            DIM, FEATURES, initializer="uniform", name="tables"
        )(ids)
    stacked = keras.ops.concatenate([keras.ops.expand_dims(x, 1), vectors], axis=1)
    products = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
    flat = keras.ops.reshape(products, (-1, (FEATURES + 1) ** 2))
    first, second = np.tril_indices(FEATURES + 1, k=-1)
    pairs = keras.ops.take(flat, first * (FEATURES + 1) + second, axis=1)
    x = keras.ops.concatenate([x, pairs], axis=1)
    for units in (512, 256):
        x = keras.layers.Dense(units, "relu")(x)
    return keras.Model({"features": features, "ids": ids}, keras.layers.Dense(1, "sigmoid")(x))


def prepare(folder: Path, vocabulary: int) -> None:
    """Exports both models, and writes deltas of ours that are published later."""
    import tf_dynemb as de

    for kind in MODELS:
        model = build(kind, vocabulary)
        if kind == "Keras":
            model.export(folder / kind / "1", verbose=False)
            continue
        tables = de.named_tables(model)
        for table in tables.values():
            rng = np.random.default_rng(1)
            for begin in range(0, vocabulary, 100_000):
                keys = np.arange(begin, min(begin + 100_000, vocabulary))
                table.upsert(keys, rng.random([len(keys), DIM], np.float32))
        chain = folder / "chain"
        de.dump(chain, model)
        de.export_saved_model(
            model, folder / kind / "1", "link", chain, follow=chain, follow_seconds=0.05
        )
        later = folder / "later"
        later.mkdir()
        rng = np.random.default_rng(2)
        for _ in range(1000):
            for table in tables.values():
                keys = rng.integers(0, vocabulary, 200)
                table.upsert(keys, rng.random([len(keys), DIM], np.float32))
            before = {each.name for each in chain.iterdir()}
            de.incremental_dump(chain, model)
            for each in chain.iterdir():
                if each.name not in before and "-delta-" in each.name:
                    each.rename(later / each.name)
            if len(list(later.iterdir())) >= 30:
                break


class Direct:
    """A process that calls a model's signature itself; a context."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        command = [sys.executable, "-m", "benchmarks.server", "--direct"]
        self._command = [*command, f"--folder={folder}", f"--vocabulary={vocabulary}"]

    def __enter__(self) -> Direct:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, text=True, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def __call__(self, threads: int, seconds: float) -> Figures:
        """Calls it from that many threads."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{threads} {seconds}\n")
        self._process.stdin.flush()
        return Figures(*map(float, self._process.stdout.readline().split()))


def call_directly(folder: Path, vocabulary: int) -> None:
    """Does what `Direct` asks for."""
    import tensorflow as tf

    import tf_dynemb  # noqa: F401  the operators

    loaded = tf.saved_model.load(str(folder))
    call = loaded.signatures["serving_default"]
    given = [{n: tf.constant(v) for n, v in each.items()} for each in batches(vocabulary)]
    for each in given[:20]:
        call(**each)

    def run(own: list[float], seconds: float) -> None:
        end, number = time.perf_counter() + seconds, 0
        while (began := time.perf_counter()) < end:
            outputs = call(**given[number % REQUESTS])
            [each.numpy() for each in outputs.values()]
            own.append(time.perf_counter() - began)
            number += 1

    for line in sys.stdin:
        threads, seconds = int(line.split()[0]), float(line.split()[1])
        times: list[list[float]] = [[] for _ in range(threads)]
        runners = [threading.Thread(target=run, args=[own, seconds]) for own in times]
        for each in runners:
            each.start()
        for each in runners:
            each.join()
        all_times = np.concatenate(times) * 1000
        print(*np.percentile(all_times, [50, 99]), len(all_times) / seconds, flush=True)


def bodies(folder: Path, vocabulary: int) -> dict[str, tuple[str, str]]:
    """Writes the bodies of requests; returns the path and headers of each form."""
    forms = {}
    for form in ("V1", "V2", "V2, binary"):
        place = folder / form.replace(", ", "_")
        place.mkdir()
        length = 0
        for number, each in enumerate(batches(vocabulary)):
            if form == "V1":
                lists = {name: array.tolist() for name, array in each.items()}
                data = json.dumps({"inputs": lists}).encode()
            else:
                is_binary = form != "V2"
                inputs, tensors = [], []
                for name, array in each.items():
                    datatype = {"int64": "INT64", "float32": "FP32"}[array.dtype.name]
                    made = {"name": name, "shape": array.shape, "datatype": datatype}
                    if is_binary:
                        made["parameters"] = {"binary_data_size": array.nbytes}
                        tensors.append(array.tobytes())
                    else:
                        made["data"] = array.ravel().tolist()
                    inputs.append(made)
                given: dict[str, Any] = {"inputs": inputs}
                if is_binary:
                    given["parameters"] = {"binary_data_output": True}
                text = json.dumps(given).encode()
                length = len(text)
                data = text + b"".join(tensors)
            (place / str(number)).write_bytes(data)
        path = "/v1/models/ctr:predict" if form == "V1" else "/v2/models/ctr/infer"
        headers = "Content-Type:application/json"
        if form == "V2, binary":
            headers = (
                f"Content-Type:application/octet-stream;Inference-Header-Content-Length:{length}"
            )
        script = WRK.replace("FOLDER", str(place)).replace("HEADERS", json.dumps(headers))
        (folder / f"{place.name}.lua").write_text(script.replace("REQUESTS", str(REQUESTS)))
        forms[form] = (path, str(folder / f"{place.name}.lua"))
    return forms


@contextlib.contextmanager
def server(model: Path) -> Iterator[tuple[str, str]]:
    """A context with a server of a model; yields the URL of REST and the address of gRPC."""
    command = [sys.executable, "-m", "tf_dynemb.serve", "--model", f"ctr={model}"]
    command += ["--http-port=0", "--grpc-port=0", "--drain-seconds=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                found = re.search(r"REST on (\S+), gRPC on (\S+)", line)
                if found:
                    threading.Thread(target=process.stderr.read, daemon=True).start()
                    yield found[1], found[2]
                    break
            else:
                raise RuntimeError(f"the server of {model} has ended")
        finally:
            process.send_signal(signal.SIGTERM)


def wrk(url: str, form: tuple[str, str], connections: int, seconds: float) -> Figures:
    """Runs wrk."""
    path, script = form
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", script, url + path]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = re.search(r"FIGURES (\S+) (\S+) (\S+) (\d+) (\d+)", printed)
    if not figures or int(figures[5]) or "Non-2xx" in printed:
        raise RuntimeError(f"requests have failed: {printed}")
    p50, p99, per_second = map(float, figures.groups()[:3])
    return Figures(p50 / 1000, p99 / 1000, per_second)


GRPC = """
import asyncio, sys, time
import grpc, numpy as np
from benchmarks.server import batches, Figures
arguments, sys.argv = sys.argv, sys.argv[:1]
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
address, connections, seconds, vocabulary = arguments[1], *map(float, arguments[2:])
def request(each):
    types = {"int64": "INT64", "float32": "FP32"}
    inputs = [dict(name=n, shape=a.shape, datatype=types[a.dtype.name]) for n, a in each.items()]
    tensors = [a.tobytes() for a in each.values()]
    return pb.ModelInferRequest(model_name="ctr", inputs=inputs, raw_input_contents=tensors)
async def main():
    requests, times = [request(each) for each in batches(int(vocabulary))], []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        async def run(number):
            end = time.perf_counter() + seconds
            while (began := time.perf_counter()) < end:
                number += 1
                await stub.ModelInfer(requests[number % len(requests)])
                times.append(time.perf_counter() - began)
        await asyncio.gather(*map(run, range(int(connections))))
    print(*(np.percentile(times, [50, 99]) * 1000), len(times) / seconds)
asyncio.run(main())
"""


def rpc(address: str, connections: int, seconds: float, vocabulary: int) -> Figures:
    """Runs a Python client of gRPC."""
    command = [sys.executable, "-c", GRPC, address, str(connections), str(seconds), str(vocabulary)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Figures(*map(float, printed.split()))


def publish_all(folder: Path, every: float) -> None:
    """Publishes the deltas that were prepared, one after the other."""
    for each in sorted((folder / "later").iterdir()):
        each.rename(folder / "chain" / each.name)
        time.sleep(every)


def measure(folder: Path, options: argparse.Namespace) -> list[str]:
    """Measures everything; returns the lines of the table."""
    forms = bodies(folder, options.vocabulary)
    cases: dict[tuple[str, str, int], list[Figures]] = {}

    def note(model: str, form: str, clients: int, figures: Figures) -> None:
        cases.setdefault((model, form, clients), []).append(figures)

    # In turns of a second for each: the machine may be half as fast a minute later.
    for kind in MODELS:
        called = Direct(folder / kind / "1", options.vocabulary)
        with called as direct, server(folder / kind) as (url, address):
            for number in range(options.repeats + 1):
                for connections, threads in ((1, 1), (32, 2)):
                    turn = {"direct": direct(threads, options.seconds)}
                    for form, sent in forms.items():
                        turn[form] = wrk(url, sent, connections, options.seconds)
                    turn["gRPC"] = rpc(address, connections, options.seconds, options.vocabulary)
                    for form, figures in turn.items():
                        if number:  # the first turn warms up
                            note(kind, form, threads if form == "direct" else connections, figures)
    with server(folder / MODELS[0]) as (url, _):
        sent = forms["V1"]
        wrk(url, sent, 8, 2)
        note(MODELS[0], "V1, before deltas", 8, wrk(url, sent, 8, 6))
        thread = threading.Thread(target=publish_all, args=[folder, 0.2])
        thread.start()
        note(MODELS[0], "V1, during 30 deltas", 8, wrk(url, sent, 8, 6))
        thread.join()
    return lines(cases)


def lines(cases: dict[tuple[str, str, int], list[Figures]]) -> list[str]:
    """Returns the table: medians of repeats, and ratios to direct calls."""
    text = [f"{platform.machine()}, {os.cpu_count()} cores, {cpu()}", ""]
    text.append(
        "| model | requests | clients | p50, ms | p99, ms | a second | p50 | p99 | a second |"
    )
    text.append("|---|---|---|---|---|---|---|---|---|")
    for (model, form, clients), turns in cases.items():
        row = Figures(*(statistics.median(each) for each in zip(*turns, strict=True)))
        cells = [model, form, str(clients), f"{row.p50:.2f}", f"{row.p99:.2f}"]
        cells.append(f"{row.per_second:.0f}")
        ratios = ["", "", ""]
        if form != "direct" and "deltas" not in form:
            beside = cases[model, "direct", 1 if clients == 1 else 2]
            pairs = [
                [one / other for one, other in zip(*both, strict=True)]
                for both in zip(turns, beside, strict=True)
            ]
            found = [f"{statistics.median(each):.2f} x" for each in zip(*pairs, strict=True)]
            ratios = [*found[:2], ""] if clients == 1 else ["", "", found[2]]
        text.append("| " + " | ".join([*cells, *ratios]) + " |")
    return text


def cpu() -> str:
    """Returns the name of the processor."""
    return next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=100_000, help="rows of each table")
    parser.add_argument("--seconds", type=int, default=1, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=15, help="turns")
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct:
        call_directly(options.folder, options.vocabulary)
        return
    if shutil.which("wrk") is None:
        sys.exit("error: this benchmark needs wrk (apt-get install wrk).")
    with tempfile.TemporaryDirectory(prefix="server_") as folder:
        prepare(Path(folder), options.vocabulary)
        print("\n".join(measure(Path(folder), options)))


if __name__ == "__main__":
    main()

"""A served model that follows dense weights: how soon, and what requests notice.

    python -m benchmarks.follow_weights --threads 1

A model of `--weights` dense weights follows a path while a thread sends requests. Deltas with the
model and deltas with the table alone are published in turns. The time of one ends when the model
has it, and begins when it has been published. `--threads` are TensorFlow's threads of a request;
with one on two cores, a core is left for the thread that follows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dynemb as de
from benchmarks.harness import describe_machine

ROWS, DIM, CHANGED, REQUEST = 100_000, 16, 1000, 16
WHOLE, TABLE = "rows and weights", "rows"


class Requests:
    """Requests of one thread, until the end of the `with`."""

    def __init__(self, loaded: Any) -> None:
        self._loaded, self._stop = loaded, threading.Event()
        self.times: list[tuple[float, float]] = []  # begin and end
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Requests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self) -> None:
        ids = tf.constant(np.arange(REQUEST)[:, None])
        while not self._stop.is_set():
            begin = time.perf_counter()
            self._loaded.serve(ids)
            self.times.append((begin, time.perf_counter()))

    def milliseconds(self, spans: list[tuple[float, float]]) -> list[float]:
        """Returns the latencies of the requests that ran within some spans of time."""
        return [
            1000 * (end - begin)
            for begin, end in self.times
            if any(first < end and begin < last for first, last in spans)
        ]


def build(weights: int) -> keras.Model:
    """Returns a model with about this number of dense weights."""
    width = round(weights**0.5)
    ids = keras.Input((1,), dtype="int64", name="ids")
    vectors = keras.layers.Flatten()(de.layers.Embedding(DIM, name="table")(ids))
    hidden = keras.layers.Dense(width)(keras.layers.Dense(width)(vectors))
    return keras.Model(ids, keras.layers.Dense(1)(hidden))


def measure(folder: Path, weights: int, repeats: int) -> list[str]:
    """Returns lines of figures."""
    model, rng = build(weights), np.random.default_rng(1)
    (table,) = de.named_tables(model).values()
    table.upsert(np.arange(ROWS), rng.normal(size=[ROWS, DIM]))
    chain = folder / "chain"
    de.dump(chain, model)
    de.export_saved_model(model, folder / "model", "link", chain, follow=chain, follow_seconds=0.01)
    loaded = tf.saved_model.load(folder / "model")
    spans: dict[str, list[tuple[float, float]]] = {WHOLE: [], TABLE: []}
    with Requests(loaded) as requests:
        time.sleep(3)
        before = [(requests.times[0][1], time.perf_counter())]
        for _ in range(repeats):
            for name, variables in ((WHOLE, model), (TABLE, de.named_tables(model))):
                table.upsert(np.arange(CHANGED), rng.normal(size=[CHANGED, DIM]))
                last = de.incremental_dump(chain, variables).id.encode()
                begin = time.perf_counter()
                while loaded.watermark()["id"].numpy() != last:
                    time.sleep(0.001)
                spans[name].append((begin, time.perf_counter()))
                time.sleep(0.05)
    _, dense = de.filter_variables(model.weights)
    count = sum(int(np.prod(each.shape)) for each in dense)
    lines = [f"{count:,} dense weights, deltas of {CHANGED:,} rows, {repeats} of each"]
    for name, each in spans.items():
        times = [1000 * (end - begin) for begin, end in each]
        lines.append(f"followed after, {name}: {statistics.median(times):.1f} ms (median)")
    for name, of in {
        "before": before,
        **{f"while {k} change": v for k, v in spans.items()},
    }.items():
        p50, p99 = np.percentile(requests.milliseconds(of), [50, 99])
        lines.append(f"requests of {REQUEST} ids {name}: median {p50:.2f}, p99 {p99:.2f} ms")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as cores")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(measure(Path(folder), options.weights, options.repeats)))


if __name__ == "__main__":
    main()

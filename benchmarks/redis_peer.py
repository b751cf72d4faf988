"""Rows by key for a serving process: Redis beside a reader and a loaded model of tf_dynemb.

    python -m benchmarks.redis_peer     # needs redis-server, and pip install redis hiredis

A request is the vectors of some random keys, as an array of float32. Redis runs on this machine,
and is called through a Unix socket, its fastest way: MGET of the keys' 8 bytes, whose answers are
joined and read as an array. The reader is `tf_dynemb.serving.Reader` (numpy only); the model is a
SavedModel whose tables are mapped. Both are in the process that asks; Redis is another one.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis
import tensorflow as tf

import tf_dynemb as de
from benchmarks.harness import Result, finish, interleave, parser_for, use_threads
from benchmarks.served_rows import Lookups

REDIS, READER, MODEL = "Redis", "Reader", "SavedModel"
CHUNK = 1 << 16


@contextlib.contextmanager
def redis_in(folder: Path) -> Iterator[redis.Redis]:
    """A Redis server without persistence, on a socket in this folder."""
    socket = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as server:
        try:
            client = redis.Redis(unix_socket_path=str(socket))
            for _ in range(100):
                with contextlib.suppress(redis.ConnectionError):
                    client.ping()
                    break
                time.sleep(0.05)
            yield client
        finally:
            server.terminate()


def main() -> None:
    """Prints microseconds of a request, and bytes of a row."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000)
    add("--dim", type=int, default=16)
    add("--keys", type=int, nargs="+", default=[1, 64, 1024], help="keys of a request")
    add("--requests", type=int, default=2000, help="requests of a repeat")
    options = parser.parse_args()
    use_threads(options.threads)
    rng = np.random.default_rng(0)
    table = de.DynamicVariable(options.dim, "zeros", "host", name="rows")
    with tempfile.TemporaryDirectory() as name, redis_in(Path(name)) as server:
        folder = Path(name)
        for begin in range(0, options.rows, CHUNK):
            keys = np.arange(begin, min(begin + CHUNK, options.rows))
            vectors = rng.normal(size=[len(keys), options.dim]).astype(np.float32)
            table.upsert(keys, vectors)
            pairs = zip(keys, vectors, strict=True)
            server.mset({key.tobytes(): vector.tobytes() for key, vector in pairs})
        de.dump(folder / "chain", [table])
        de.export_saved_model(Lookups(table), folder / "model", "link", folder / "chain")
        reader = de.serving.Reader(folder / "chain")
        model = tf.saved_model.load(str(folder / "model"))
        lookup = model.lookup.get_concrete_function(tf.TensorSpec([None], tf.int64))

        def from_redis(keys: Any) -> Any:
            found = server.mget([key.tobytes() for key in keys])
            return np.frombuffer(b"".join(found), np.float32).reshape(len(keys), -1)

        asks = {
            REDIS: from_redis,
            READER: reader.lookup,
            MODEL: lambda keys: lookup(tf.constant(keys)).numpy(),
        }
        results = []
        for count in options.keys:
            requests = list(rng.integers(0, options.rows, [options.requests, count]))
            expected = table.lookup(requests[0], insert=False).numpy()
            for ask in asks.values():
                np.testing.assert_array_equal(ask(requests[0]), expected)

            def microseconds(ask: Any, requests: Any = requests) -> float:
                began = time.perf_counter()
                for keys in requests:
                    ask(keys)
                return (time.perf_counter() - began) / len(requests) * 1e6

            actions = {each: lambda ask=ask: microseconds(ask) for each, ask in asks.items()}
            figures = interleave(actions, options.repeats)
            results.append(Result(f"request of {count} keys", "us", figures, less_is_better=True))
        used = int(server.info("memory")["used_memory"])
        print(f"Redis: {used / options.rows:.0f} bytes of memory for each row of {4 * options.dim}")
    finish(results, options.json)


if __name__ == "__main__":
    main()

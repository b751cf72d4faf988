"""Chains in object stores beside copies of the same files by the library, s3fs.

    python -m benchmarks.stores [--url s3://bucket/folder] [--rows 1000000]

Without a URL, the store is moto's S3 server, in another process of this machine, whose memory holds
the objects. It reads a whole object for each range of it, so that only a real store tells how long
reading takes. The ways take turns; medians.

1. Writing: `de.dump(URL)`, and `fs.put` of the files of a local dump.
2. Reading: `de.load(URL)`, and `fs.get` of the files, which nothing verifies or loads.
3. A lookup of 64 random keys by a `Reader` of the URL, which has not read them before: the bytes
   that it asks for and, of a real store, the time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np

import tf_dynemb as de
from benchmarks.harness import describe_machine, interleave
from tf_dynemb.storage.store_folder import StoreFolder

DIMENSION, KEYS = 16, 64


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A context with an S3 server that has a bucket; yields a URL in it."""
    import boto3

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        try:
            for _ in range(100):
                with contextlib.suppress(Exception):
                    boto3.client("s3").create_bucket(Bucket="bench")
                    break
                time.sleep(0.2)
            yield "s3://bench/chains"
        finally:
            server.kill()


def trained(rows: int) -> tuple[de.DynamicVariable, de.OptimizerWrapper]:
    """Returns a table with the state of Adam."""
    import keras
    import tensorflow as tf

    table = de.DynamicVariable(DIMENSION, name="table", init_capacity=rows)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.01))
    for begin in range(0, rows, 1 << 18):
        keys = tf.range(begin, min(begin + (1 << 18), rows), dtype=tf.int64) * 7
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.sparse_read(keys) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    return table, optimizer


def compare(title: str, ways: dict[str, Callable[[], float]], size: int, rounds: int) -> None:
    """Prints how long each of two ways takes, and how the first compares with the second."""
    seconds = interleave(ways, rounds)
    first, second = medians = [statistics.median(seconds[name]) for name in ways]
    for name, median in zip(ways, medians, strict=True):
        print(f"{title:6}{name:8}{median:8.2f} s{size / median / 1e6:8.0f} MB/s")
    print(f"{title:6}throughput of the first beside the second: {second / first:.2f}")


def measure(url: str, rows: int, rounds: int, folder: Path, is_real: bool) -> None:
    """Prints all figures.

    Args:
        url: a folder in a store.
        rows: the rows of the table.
        rounds: how often each way is taken.
        folder: a local folder.
        is_real: whether times of reading mean something.
    """
    table, optimizer = trained(rows)
    de.dump(folder / "chain", [table], optimizer, quiet=True)
    size = sum(file.stat().st_size for file in (folder / "chain").rglob("*.npy"))
    fs, root = fsspec.core.url_to_fs(url)
    print(f"{rows:,} rows of {DIMENSION} + {2 * DIMENSION} floats, {size / 1e6:.0f} MB")
    number = iter(range(1 << 30))

    def timed(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def dump() -> float:
        target = f"{url}/dump{next(number)}"
        seconds = timed(lambda: de.dump(target, [table], optimizer, quiet=True))
        fs.rm(target, recursive=True)
        return seconds

    def put() -> float:
        target = f"{root}/put{next(number)}"
        seconds = timed(lambda: fs.put(str(folder / "chain"), target, recursive=True))
        fs.rm(target, recursive=True)
        return seconds

    de.dump(f"{url}/chain", [table], optimizer, quiet=True)
    into = de.DynamicVariable(DIMENSION, name="table", init_capacity=rows)

    def load() -> float:
        return timed(lambda: de.load(f"{url}/chain", [into], optimizer, quiet=True))

    def get() -> float:
        with tempfile.TemporaryDirectory(dir=folder) as target:
            return timed(lambda: fs.get(f"{root}/chain", target, recursive=True))

    compare("write", {"de.dump": dump, "fs.put": put}, size, rounds)
    if is_real:
        compare("read", {"de.load": load, "fs.get": get}, size, rounds)

    asked = [0]
    real = StoreFolder.read_ranges

    def counted(of: StoreFolder, file: str, begins: list[int], ends: list[int]) -> bytearray:
        asked[0] += sum(ends) - sum(begins)
        return real(of, file, begins, ends)

    rng, found = np.random.default_rng(0), []
    with mock.patch.object(StoreFolder, "read_ranges", counted):
        reader = de.serving.Reader(f"{url}/chain")
        for _ in range(20):
            keys = rng.integers(0, rows, KEYS) * 7
            asked[0] = 0
            found.append((timed(lambda keys=keys: reader.lookup(keys)), asked[0]))
    seconds, asked_bytes = (statistics.median(each) for each in zip(*found, strict=True))
    took = f", {seconds * 1e3:.0f} ms" if is_real else ""
    print(f"lookup of {KEYS} keys: {asked_bytes / 1e3:.0f} kB{took}")
    fs.rm(f"{url}/chain", recursive=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", help="a folder in a store, for objects that are removed")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe_machine())
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = options.url or stack.enter_context(s3_server())
        measure(url, options.rows, options.rounds, folder, options.url is not None)


if __name__ == "__main__":
    main()

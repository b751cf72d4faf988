"""Memory: what a row takes beyond its key and its vector, by the growth of the process.

Each table is filled in a process of its own, because TensorFlow's allocator keeps what it frees.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np

from benchmarks.harness import (
    STATIC,
    Result,
    add_contenders,
    finish,
    parser_for,
    resident_bytes,
)

KEY_BYTES, FLOAT_BYTES = 8, 4


def bytes_of_rows(name: str, dim: int, rows: int, batch: int) -> float:
    """Fills a table that grows and returns by how many bytes a row made this process larger."""
    import tensorflow as tf

    from benchmarks.peers import empty_table

    # A first, small table: so that what TensorFlow allocates once is not counted.
    values = tf.ones([batch, dim])
    first = empty_table(name, dim, batch, sized=False)
    first.upsert(first.ids(np.arange(batch)), values)
    before = resident_bytes()
    table = empty_table(name, dim, rows, sized=False)
    held = rows - rows % batch
    for start in range(0, held, batch):
        table.upsert(table.ids(np.arange(start, start + batch)), values)
    return (resident_bytes() - before) / held


def measure(name: str, dim: int, rows: int, batch: int) -> float:
    """Like `bytes_of_rows`, in a new process, and less the key and the vector."""
    command = [sys.executable, "-m", "benchmarks.memory", "--contender", name]
    command += ["--dims", str(dim), "--rows", str(rows), "--batch", str(batch)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    key = 0 if name == STATIC else KEY_BYTES
    return float(done.stdout.split()[-1]) - key - FLOAT_BYTES * dim


def main() -> None:
    """Measures all contenders; with --contender, prints the bytes of one and nothing else."""
    parser = parser_for(__doc__)
    add_contenders(parser)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows in a table")
    parser.add_argument("--batch", type=int, default=65_536, help="keys in a call")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64], help="vector sizes")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(bytes_of_rows(options.contender, options.dims[0], options.rows, options.batch))
        return
    results = [
        Result(
            f"memory beyond key and vector, dim {dim}",
            "bytes/row",
            {
                name: [measure(name, dim, options.rows, options.batch)]
                for name in options.contenders
            },
            less_is_better=True,
        )
        for dim in options.dims
    ]
    finish(results, options.json)


if __name__ == "__main__":
    main()

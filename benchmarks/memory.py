"""Memory per row beyond key, vector and optimizer state, measured by the growth of the process.

Each table is filled in a separate process, because TensorFlow's allocator keeps freed memory.
Tables without an optimizer are filled by upserts, others by training steps on new ids. "Steady" is
the memory that the process holds afterwards, "peak" the maximum that it held.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    DENSE,
    STATIC,
    Result,
    add_contenders,
    finish,
    parser_for,
    process_bytes,
    resident_bytes,
)

KEY_BYTES, FLOAT_BYTES = 8, 4
STATES = {"none": 0, "adagrad": 1, "adam": 2}  # state, in vectors per row


def peak_bytes() -> int:
    """Returns the maximum memory of this process since `reset_peak`."""
    return process_bytes("VmHWM")


def reset_peak() -> None:
    """Resets the peak to the current memory of the process."""
    Path("/proc/self/clear_refs").write_text("5")


def bytes_of_rows(
    name: str, dim: int, rows: int, batch: int, optimizer: str
) -> tuple[float, float]:
    """Fills a growing table; returns the growth of the process in bytes per row: steady, peak."""
    import tensorflow as tf

    from benchmarks.peers import empty_table
    from benchmarks.sparse import optimizer_for, training_step

    values = tf.ones([batch, dim])

    def fill(held: int) -> Any:
        table = empty_table(name, dim, held, sized=False)
        if optimizer == "none":
            for start in range(0, held, batch):
                table.upsert(table.ids(np.arange(start, start + batch)), values)
            return table
        stepper = optimizer_for(optimizer, [table], keras_peer=False)
        step = training_step([table], batch, 1, stepper)
        for start in range(0, held, batch):
            step([table.ids(np.arange(start, start + batch))])
        return table, stepper

    # A small table first, so that one-time allocations of TensorFlow are not counted.
    first = fill(batch)
    before = resident_bytes()
    reset_peak()
    held = rows - rows % batch
    table = fill(held)
    sizes = (resident_bytes() - before) / held, (peak_bytes() - before) / held
    del first, table
    return sizes


def measure(name: str, dim: int, rows: int, batch: int, optimizer: str) -> tuple[float, float]:
    """Like `bytes_of_rows` in a new process, minus the key, the vector and the state."""
    command = [sys.executable, "-m", "benchmarks.memory", "--contender", name]
    command += ["--dims", str(dim), "--rows", str(rows), "--batch", str(batch)]
    command += ["--optimizers", optimizer]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    steady, peak = (float(word) for word in done.stdout.split()[-2:])
    payload = (0 if name == STATIC else KEY_BYTES) + FLOAT_BYTES * dim * (1 + STATES[optimizer])
    return steady - payload, peak - payload


def cases(options: argparse.Namespace, dim: int, optimizer: str) -> list[Result]:
    """Returns the steady and the peak size of each contender."""
    names = [name for name in options.contenders if optimizer == "none" or name != DENSE]
    sizes = {name: measure(name, dim, options.rows, options.batch, optimizer) for name in names}
    with_state = "" if optimizer == "none" else f" and {optimizer} state"
    return [
        Result(
            f"memory beyond key, vector{with_state}, dim {dim}{suffix}",
            "bytes/row",
            {name: [size[which]] for name, size in sizes.items()},
            less_is_better=True,
        )
        for which, suffix in enumerate(["", ", peak"])
    ]


def main() -> None:
    """Measures all contenders; with --contender, prints only the bytes of one."""
    parser = parser_for(__doc__)
    add_contenders(parser)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows per table")
    parser.add_argument("--batch", type=int, default=65_536, help="keys per call")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64], help="floats per vector")
    parser.add_argument("--optimizers", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        only = options.optimizers[0]
        print(*bytes_of_rows(options.contender, options.dims[0], options.rows, options.batch, only))
        return
    results: list[Result] = []
    for optimizer in options.optimizers:
        for dim in options.dims:
            results += cases(options, dim, optimizer)
    finish(results, options.json)


if __name__ == "__main__":
    main()

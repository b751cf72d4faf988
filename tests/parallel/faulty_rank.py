"""The script that each rank of test_rank_faults.py runs.

    python faulty_rank.py OPTIONS

OPTIONS is JSON: the arguments of `init`, the number of ranks, the fault, the ranks that have it and
a folder. The ranks exchange numbers until that fails. After some exchanges there is a fault:

- "kill": the process is killed, at any moment of its exchanges.
- "stop": it stops, at any moment.
- "full": it stops while the others send it more than all buffers keep.
- "late": it calls the next exchange long after the others.
- "order": it calls another operation.
- "absent": it has not joined the others.
- "": none.

Each other rank writes its error to a file, and waits for the files of the others, so that no
launcher ends them sooner.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import threading
import time

import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.ranks import launchers

OPTIONS = json.loads(sys.argv[1])
FOLDER = pathlib.Path(OPTIONS["folder"])
RANK = OPTIONS["place"].get("rank")
if RANK is None:
    RANK = launchers.find(os.environ).rank
SIZE, FAULT, FAULTY = OPTIONS["size"], OPTIONS["fault"], OPTIONS["faulty"]
IS_FAULTY = RANK in FAULTY
# Those that end with an error.
WRITERS = set(range(SIZE)) - (set() if FAULT in ("late", "order") else set(FAULTY))
# Rows of 4 bytes for each rank, in turns. With ranks of several hosts, they come with their
# announcement, are forwarded after it, and come after it and are not forwarded.
ROWS = (4, 5_000, 50_000)
MANY = 1 << 24


@tf.function(input_signature=[tf.TensorSpec([SIZE], tf.int32)])
def exchange(rows):
    data = tf.zeros([tf.reduce_sum(rows)], tf.int32)
    return communicator.get().alltoall(data, rows, "numbers")


def write(name, **content):
    partial = FOLDER / "partial" / f"{name}.{RANK}"
    partial.parent.mkdir(exist_ok=True)
    partial.write_text(json.dumps(content))
    partial.rename(FOLDER / f"{name}.{RANK}")


def wait_for(name, ranks):
    while not all((FOLDER / f"{name}.{rank}").exists() for rank in ranks):
        time.sleep(0.01)


def fail():
    if FAULT in ("kill", "stop", "full"):
        number = signal.SIGKILL if FAULT == "kill" else signal.SIGSTOP
        moment = 0.5 if FAULT == "full" else random.uniform(0, 0.05)
        threading.Timer(moment, os.kill, (os.getpid(), number)).start()
    elif FAULT == "late":
        time.sleep(3 * OPTIONS["timeout"])
    elif FAULT == "order":
        communicator.get().allgather(tf.zeros([1]), "another")


def main():
    global begin
    if FAULT == "absent" and IS_FAULTY:
        time.sleep(1000)
    if FAULT != "absent":  # imports take long, and on a busy machine not equally long
        write("imported")
        wait_for("imported", range(SIZE))
    begin = time.monotonic()
    de.init(OPTIONS["engine"], timeout=OPTIONS["timeout"], **OPTIONS["place"])
    for step in range(10**6):
        begin = time.monotonic()
        rows = [ROWS[step % len(ROWS)]] * SIZE
        if FAULT == "full" and step > 20:
            rows = [MANY if r in FAULTY and not IS_FAULTY else 4 for r in range(SIZE)]
        exchange(rows)
        if step == 20:
            write("ready")
            if IS_FAULTY:
                begin = time.monotonic()
                fail()


begin = 0.0
try:
    main()
except Exception as error:
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    write("error", waited=time.monotonic() - begin, kind=type(error).__name__, text=text)
    wait_for("error", WRITERS)
os._exit(3)

"""The script that each rank of test_dump_death.py runs.

    python dump_and_die.py ENGINE CHAIN REPORTS RANK WHERE

Dumps a base, after another one if there is none yet, or after a load. If WHERE is "append" or
"rename", the process of RANK is killed at its fourth `append`, or before its first `rename`; if
WHERE is "never", no process is killed. Each other rank writes a report of how the dump ended.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

import numpy as np
from rank_model import Rank

import tf_dynemb as de
from tf_dynemb import communicator, storage


def killing(function, call):
    calls = iter(range(1000))

    def killed(*args):
        if next(calls) == call:
            time.sleep(2)  # until the others wait for this rank
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    return killed


def main():
    engine = sys.argv[1]
    chain, reports = map(pathlib.Path, sys.argv[2:4])
    dying, where = int(sys.argv[4]), sys.argv[5]
    de.init(engine)
    # When a rank dies, the launcher ends the others, which must write their reports first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    comm = communicator.get()
    rank = Rank(comm, chain)
    is_first = not chain.exists()
    comm.barrier()
    if is_first:
        rank.write(np.arange(500), 1)
        rank.dump()
    else:
        rank.load()
    rank.write(np.arange(500), 2)
    if comm.rank == dying and where == "append":
        storage.ColumnWriter.append = killing(storage.ColumnWriter.append, 3)
    elif comm.rank == dying and where == "rename":
        os.rename = killing(os.rename, 0)
    try:
        rank.dump()
        ended = "dumped"
    except BaseException as error:
        ended = type(error).__name__
    (reports / f"{where}{dying}.{comm.rank}").write_text(ended)


main()

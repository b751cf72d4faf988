"""Starts ranks with horovodrun, and ensures that they end."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
import time

INSTALLED = importlib.util.find_spec("horovod") is not None
MISSING = "Horovod is not installed: run `make horovod`"

# `gloo_built` would import TensorFlow, which takes 3 s, to find out whether Horovod has Gloo.
HOROVODRUN = """
import sys

from horovod.runner import launch

sys.tracebacklimit = 0
launch.gloo_built = lambda verbose: True
launch.run_commandline()
"""

# Many processes share few cores, and a rank that others wait for must not wait for long.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # The milliseconds between two looks of a rank for work. With Horovod's default, 1, this takes a
    # fifth of the processors' time.
    "HOROVOD_CYCLE_TIME": "4",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a launch: horovodrun's exit status, or None if the limit ended it."""

    status: int | None
    output: str
    seconds: float

    def tail(self) -> str:
        """Returns the end of the output, without the lines of pytest's own frames."""
        lines = self.output.splitlines()
        kept = [line for line in lines if "/_pytest/" not in line and "/pluggy/" not in line]
        return "\n".join(kept[-60:])


def horovodrun(
    ranks: int,
    command: list[str],
    log: pathlib.Path,
    limit: float,
    cwd: pathlib.Path | None = None,
    **environment: str,
) -> Ended:
    """Runs a command as several ranks, for at most `limit` seconds; writes its output to `log`."""
    if not INSTALLED:
        raise RuntimeError(MISSING)
    start = time.monotonic()
    launcher = [sys.executable, "-c", HOROVODRUN, "--gloo", "--disable-cache"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*launcher, "-np", str(ranks), *command],
            cwd=cwd,
            env={**os.environ, **ENVIRONMENT, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    return Ended(status, log.read_text(errors="replace"), time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends horovodrun, which ends its ranks. If it is killed instead, the ranks end themselves."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

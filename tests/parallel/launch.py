"""Starts ranks by the launcher of each engine, and ensures that they end."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

# The engines, by the names that `init` has for them; the first one runs all cases. NCCL has a
# stand-in on the fake GPU (tools/fake_gpu.sh).
ENGINES = ("gloo", "horovod", "mpi", *(["nccl"] if "FAKE_GPU_LIBRARY" in os.environ else []))


def missing(engine: str) -> str | None:
    """Returns why ranks of an engine cannot be started; None if they can."""
    if engine == "horovod" and importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed: run `make horovod`"
    if engine == "mpi" and MPIEXEC is None:
        return "there is no mpiexec: `pip install mpich`"
    return None


# That of this Python (`pip install mpich`) goes before others.
MPIEXEC = shutil.which("mpiexec", path=str(pathlib.Path(sys.executable).parent)) or shutil.which(
    "mpiexec"
)

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
    # Open MPI's launcher counts cores, and refuses to run for root.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a launch: the launcher's exit status, or None if the limit ended it."""

    status: int | None
    output: str
    seconds: float

    def tail(self) -> str:
        """Returns the end of the output, without the lines of pytest's own frames."""
        lines = self.output.splitlines()
        kept = [line for line in lines if "/_pytest/" not in line and "/pluggy/" not in line]
        return "\n".join(kept[-60:])


def launcher(engine: str, ranks: int, options: Sequence[str] = ()) -> list[str]:
    """Returns the command of the launcher, with more options, before that of the ranks."""
    if engine in ("gloo", "nccl"):
        words = [sys.executable, "-m", "tf_dynemb", "run", "-np"]
    elif engine == "mpi":
        words = [str(MPIEXEC), "-n"]
    else:
        words = [sys.executable, "-c", HOROVODRUN, "--gloo", "--disable-cache", "-np"]
    return [*words, str(ranks), *options]


def run(
    engine: str,
    ranks: int,
    command: list[str],
    log: pathlib.Path,
    limit: float,
    cwd: pathlib.Path | None = None,
    options: Sequence[str] = (),
    **environment: str,
) -> Ended:
    """Runs a command as several ranks, for at most `limit` seconds; writes its output to `log`.

    `options` are those of `launcher`.
    """
    reason = missing(engine)
    if reason is not None:
        raise RuntimeError(reason)
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*launcher(engine, ranks, options), *command],
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
    """Ends the launcher, which ends its ranks. If it is killed instead, they end themselves."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

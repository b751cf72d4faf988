"""The ranks of one machine of `tf-dynemb run --hosts`: what the launcher starts there by ssh.

The first line of standard input says what to start, as JSON: so no secret is on a command line. The
ranks end when the input does: with the connection, or with the launcher.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence

from tf_dynemb.launcher.processes import Processes, Start, told_to_end

# What would tell the ranks another place than this launcher does.
_OTHERS = (
    *("TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID"),
)


def starts(
    command: Sequence[str], first: int, num: int, environment: Mapping[str, str]
) -> list[Start]:
    """Returns the processes of the ranks `first` to `first + num - 1`, all those of this machine.

    `environment` has the variables that all ranks share.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHERS}
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    return [
        Start(
            f"rank {first + local}",
            command,
            {
                **inherited,
                "PYTHONUNBUFFERED": "1",
                **environment,
                "RANK": str(first + local),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(num),
            },
            prefix=f"[{first + local}] ",
        )
        for local in range(num)
    ]


def main() -> None:
    """Starts the ranks, and exits with the exit code of the first that fails, or 0."""
    told = json.loads(sys.stdin.buffer.readline())
    over = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        over.set()

    threading.Thread(target=watch, daemon=True).start()
    with told_to_end() as signals:
        ranks = starts(told["command"], told["first"], told["num"], told["environment"])
        try:
            failure = Processes(ranks, told["grace"], signals).wait(over.is_set)
        except BrokenPipeError:
            os._exit(1)
    if failure is not None:
        failure.show()
    sys.stdout.flush()
    os._exit(0 if failure is None else failure.exit_code)  # not held up by `watch`

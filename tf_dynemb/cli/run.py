"""`run`: starts a script as several ranks on this machine."""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

# The seconds that ranks have to end by themselves after one has failed: most end with an error that
# says so. Then they get SIGTERM, and after as long again SIGKILL.
_PATIENCE = 5.0
# The last lines of the rank that failed first, which are shown again at the end.
_LAST_LINES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "-np", "--ranks", type=int, required=True, metavar="N", help="the number of ranks"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="the port of 127.0.0.1 at which the ranks meet; default: a free one",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGUMENT ...]",
        help="a script, run by this Python if its name ends with .py, and its arguments",
    )


def run(options: argparse.Namespace) -> int:
    """Runs a script as several ranks on this machine, which `init()` joins; prefixes their output.

    If a rank fails, all are ended, and the last lines of the one that failed first are shown again.
    The exit code is that rank's; for a rank that a signal has ended, 128 + the signal.
    """
    command = [word for i, word in enumerate(options.script) if (i, word) != (0, "--")]
    if options.ranks < 1:
        raise ValueError(f"-np must be 1 or more, got {options.ranks}.")
    if not command:
        raise ValueError("no script is named: tf-dynemb run -np 2 train.py")
    if command[0].endswith(".py"):
        command.insert(0, sys.executable)
    with _ended_by_sigterm(), contextlib.closing(_Ranks(options, command)) as ranks:
        failed = ranks.wait()
    if failed is None:
        return 0
    rank, code, lines = failed
    how = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
    last = "".join(f"  {line}\n" for line in lines)
    print(f"rank {rank} failed first: {how}\n{last}", end="", file=sys.stderr)
    return code if code > 0 else 128 - code


class _Ranks:
    """The processes of the ranks, and the threads that read their output."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        shared = {
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(options.port or _free_port()),
            "TF_DYNEMB_RANKS_SECRET": secrets.token_hex(16),
            "PYTHONUNBUFFERED": "1",
        }
        self._lock = threading.Lock()
        self._last: list[collections.deque[str]] = []
        self._readers: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(options.ranks):
            process = subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=_end_with_parent,
            )
            self._processes.append(process)
            self._last.append(collections.deque(maxlen=_LAST_LINES))
            for source, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(target=self._copy, args=(rank, source, to), daemon=True)
                reader.start()
                self._readers.append(reader)

    def wait(self) -> tuple[int, int, list[str]] | None:
        """Waits for all; returns the first that failed, its exit code and its last lines."""
        failed, end = None, float("inf")
        while any(process.poll() is None for process in self._processes):
            codes = [process.poll() for process in self._processes]
            if failed is None and any(codes):
                failed = next(rank for rank, code in enumerate(codes) if code)
                end = time.monotonic() + _PATIENCE
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        codes = [process.poll() for process in self._processes]
        if failed is None:
            failed = next((rank for rank, code in enumerate(codes) if code), None)
        self.close()
        if failed is None:
            return None
        return failed, self._processes[failed].returncode, list(self._last[failed])

    def close(self) -> None:
        """Ends the processes that still run."""
        for end in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self._processes if process.poll() is None]
            for process in running:
                process.send_signal(end)
            until = time.monotonic() + _PATIENCE
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        for reader in self._readers:
            reader.join(_PATIENCE)  # a process that a rank has started may hold its output open

    def _copy(self, rank: int, source: IO[bytes], to: Any) -> None:
        for line in source:
            text = line.decode(errors="replace").rstrip("\r\n")
            with self._lock:
                self._last[rank].append(text)
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    to.write(f"[{rank}] {text}\n")
                    to.flush()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit inside, so that the ranks are ended, too."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_with_parent() -> None:
    """Called in the new process: the system sends it SIGTERM if the launcher is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, of Linux


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

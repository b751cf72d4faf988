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
# says so.
_PATIENCE = 5.0
# The last lines of the rank that failed first, which are shown again at the end.
_LAST_LINES = 20
# The most bytes of a line; what is longer is split.
_LINE = 1 << 16
# What would tell the ranks another place than this launcher does.
_OTHERS = (
    *("TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID"),
)

_libc = ctypes.CDLL(None)


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
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long ranks may take to end after SIGTERM or Ctrl-C; default: 30",
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
    ranks = _Ranks(options, command)
    try:
        with _ended_by_sigterm():
            failed = ranks.wait()
    except KeyboardInterrupt:  # the terminal has sent SIGINT to this process only
        ranks.end(signal.SIGINT, signal.SIGTERM)
        return 128 + signal.SIGINT
    finally:
        ranks.end()
    if failed is None:
        return 0
    rank, code, lines = failed
    how = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
    with contextlib.suppress(ValueError):  # a real-time signal
        how = f"ended by {signal.Signals(-code).name}"
    _write(sys.stderr, f"rank {rank} failed first: {how}\n".encode())
    for line in lines:
        _write(sys.stderr, b"  " + line + b"\n")
    return code if code > 0 else 128 - code


class _Ranks:
    """The processes of the ranks, with those that they start, and the threads that read them."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        shared = {
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(options.port or _free_port()),
            "TF_DYNEMB_RANKS_SECRET": secrets.token_hex(16),
            "PYTHONUNBUFFERED": "1",
        }
        environment = {**os.environ, **shared}
        for name in _OTHERS:
            environment.pop(name, None)
        self._grace = options.grace
        self._lock = threading.Lock()
        self._last: list[collections.deque[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            # All before the threads: a process must not be forked beside them.
            for rank in range(options.ranks):
                process = subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    preexec_fn=_begin,
                )
                self._processes.append(process)
                self._last.append(collections.deque(maxlen=_LAST_LINES))
        except BaseException:
            self.end()
            raise
        self._readers = [
            threading.Thread(target=self._copy, args=(rank, source, to), daemon=True)
            for rank, process in enumerate(self._processes)
            for source, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def wait(self) -> tuple[int, int, list[bytes]] | None:
        """Waits for all; returns the first that failed, its exit code and its last lines."""
        failed, end = None, float("inf")
        while True:
            codes = [process.poll() for process in self._processes]
            if failed is None and any(codes):
                failed = next(rank for rank, code in enumerate(codes) if code)
                end = time.monotonic() + _PATIENCE
            if None not in codes or time.monotonic() > end:
                break
            time.sleep(0.02)
        self.end()
        if failed is None:
            return None
        return failed, self._processes[failed].returncode, list(self._last[failed])

    def end(self, *signals: signal.Signals) -> None:
        """Ends the processes that still run: by each signal, and at last by SIGKILL."""
        for each in signals or (signal.SIGTERM,):
            self._signal(each)
            end = time.monotonic() + self._grace
            while any(process.poll() is None for process in self._processes):
                if time.monotonic() > end:
                    break
                time.sleep(0.02)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        end = time.monotonic() + _PATIENCE  # a process may have left the group with its output
        for reader in getattr(self, "_readers", ()):
            reader.join(max(0.0, end - time.monotonic()))

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _copy(self, rank: int, source: IO[bytes], to: Any) -> None:
        prefix, rest = f"[{rank}] ".encode(), b""
        while piece := os.read(source.fileno(), _LINE):
            *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _LINE:
                lines, rest = [*lines, rest], b""
            self._show(rank, prefix, lines, to)
        self._show(rank, prefix, [rest] if rest else [], to)

    def _show(self, rank: int, prefix: bytes, lines: list[bytes], to: Any) -> None:
        with self._lock:
            for line in lines:
                if line:
                    self._last[rank].append(line)
                _write(to, prefix + line + b"\n")


def _write(to: Any, text: bytes) -> None:
    """Writes bytes as they are, whatever the encoding of the stream."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        to.flush()
        to.buffer.write(text)
        to.buffer.flush()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit inside, so that the ranks are ended, too."""

    def end(number: int, _: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


def _begin() -> None:
    """Called in the new process, which becomes the first of a group.

    If the launcher is killed, the system sends it SIGTERM.
    """
    os.setpgid(0, 0)
    with contextlib.suppress(AttributeError):
        _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, of Linux


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

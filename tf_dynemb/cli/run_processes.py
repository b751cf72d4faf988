"""The processes of a launcher: their output, the first that fails, and the end of all of them."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

# The seconds that processes have to end by themselves after one has failed: most ranks end with an
# error that says so.
_PATIENCE = 5.0
# The last lines of the process that failed first, which are shown again at the end.
_LAST_LINES = 20
# The most bytes of a line; what is longer is split.
_LINE = 1 << 16

_libc = ctypes.CDLL(None)


@dataclasses.dataclass(frozen=True)
class Start:
    """A process to start.

    Attributes:
        name: its name in messages.
        command: its program and arguments.
        environment: its variables.
        prefix: what each line of its output begins with.
        text: what it reads from its standard input, whose end then tells it to end; None: it has
            no input, and signals end it.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    prefix: str = ""
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """The process that failed first, its exit code as `Popen` has it, and its last lines."""

    name: str
    code: int
    lines: Sequence[bytes]

    @property
    def exit_code(self) -> int:
        """The exit code that a shell has for it: 128 + the signal, if one has ended it."""
        return self.code if self.code > 0 else 128 - self.code

    def show(self) -> None:
        """Writes it to standard error."""
        how = f"exit code {self.code}" if self.code > 0 else f"ended by signal {-self.code}"
        with contextlib.suppress(ValueError):  # a real-time signal
            how = f"ended by {signal.Signals(-self.code).name}"
        write(sys.stderr, f"{self.name} failed first: {how}\n".encode())
        for line in self.lines:
            write(sys.stderr, b"  " + line + b"\n")


class Processes:
    """The processes, with those that they start, and the threads that read them.

    Args:
        starts: the processes to start.
        grace: the seconds that they may take to end when they are told to.
    """

    def __init__(self, starts: Sequence[Start], grace: float) -> None:
        self._starts = starts
        self._grace = grace
        self._lock = threading.Lock()
        self._last = [collections.deque[bytes](maxlen=_LAST_LINES) for _ in starts]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            # All before the threads: a process must not be forked beside them.
            for start in starts:
                self._processes.append(
                    subprocess.Popen(
                        start.command,
                        env=start.environment,
                        stdin=subprocess.DEVNULL if start.text is None else subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        preexec_fn=_begin,
                    )
                )
        except BaseException:
            self.end()
            raise
        for number, process in enumerate(self._processes):
            for source, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(target=self._copy, args=(number, source, to), daemon=True)
                self._readers.append(reader)
                reader.start()
        for start, process in zip(starts, self._processes, strict=True):
            if process.stdin is not None:
                with contextlib.suppress(OSError):  # it has ended, which `wait` reports
                    process.stdin.write(str(start.text).encode())
                    process.stdin.flush()

    def wait(self, stop: Callable[[], bool] = lambda: False) -> Failure | None:
        """Waits for all, or until one fails or stop() is true; ends them; returns the failure."""
        failed, end = None, float("inf")
        while not stop():
            codes = [process.poll() for process in self._processes]
            if failed is None and any(codes):
                failed = next(number for number, code in enumerate(codes) if code)
                end = time.monotonic() + _PATIENCE
            if None not in codes or time.monotonic() > end:
                break
            time.sleep(0.02)
        self.end()
        if failed is None:
            return None
        code = int(self._processes[failed].returncode)
        return Failure(self._starts[failed].name, code, list(self._last[failed]))

    def end(self, *signals: signal.Signals) -> None:
        """Ends the processes that still run: by each signal, and at last by SIGKILL."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for each in signals or (signal.SIGTERM,):
            self._signal(each, lambda process: process.stdin is None)
            end = time.monotonic() + self._grace
            while any(process.poll() is None for process in self._processes):
                if time.monotonic() > end:
                    break
                time.sleep(0.02)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        end = time.monotonic() + _PATIENCE  # a process may have left the group with its output
        for reader in self._readers:
            reader.join(max(0.0, end - time.monotonic()))

    def _signal(
        self,
        number: signal.Signals,
        which: Callable[[subprocess.Popen[bytes]], bool] = lambda process: True,
    ) -> None:
        for process in filter(which, self._processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
                os.killpg(process.pid, signal.SIGCONT)  # a stopped process acts on it then

    def _copy(self, number: int, source: IO[bytes], to: Any) -> None:
        rest = b""
        while piece := os.read(source.fileno(), _LINE):
            *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _LINE:
                lines, rest = [*lines, rest], b""
            self._show(number, lines, to)
        self._show(number, [rest] if rest else [], to)

    def _show(self, number: int, lines: list[bytes], to: Any) -> None:
        prefix = self._starts[number].prefix.encode()
        with self._lock:
            for line in lines:
                if line:
                    self._last[number].append(line)
                write(to, prefix + line + b"\n")


def write(to: Any, text: bytes) -> None:
    """Writes bytes as they are, whatever the encoding of the stream."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        to.flush()
        to.buffer.write(text)
        to.buffer.flush()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit inside, so that the processes are ended, too."""

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

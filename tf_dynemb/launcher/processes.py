"""The processes of a launcher: their output, the first that fails, and the end of all of them."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
import pathlib
import select
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
# The seconds between two looks at the processes.
_LOOK = 0.02

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
        told: the list of `told_to_end`.
    """

    def __init__(self, starts: Sequence[Start], grace: float, told: Sequence[int]) -> None:
        self._starts = starts
        self._grace = grace
        self._told = told
        self._is_read = True  # by the reader of this process's own output
        self._lock = threading.Lock()
        self._last = [collections.deque[bytes](maxlen=_LAST_LINES) for _ in starts]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        # If it is ignored, as some programs that start this one leave it, there are no exit codes.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
        """Waits for all; then ends what they have started; returns the first failure.

        Ends all of them when one fails, when this process is told to end, or when stop() is true.

        Raises:
            BrokenPipeError: nobody reads the output any more, which also ends all of them.
        """
        failed, end = None, float("inf")
        while not self._told and not stop() and self._is_read:
            codes = [_exit_code(process) for process in self._processes]
            if failed is None and any(codes):
                failed = next(number for number, code in enumerate(codes) if code)
                end = time.monotonic() + _PATIENCE
            if None not in codes or time.monotonic() > end:
                break
            time.sleep(_LOOK)
        interrupted = self._told and self._told[0] == signal.SIGINT
        self.end(signal.SIGINT if interrupted else signal.SIGTERM)
        if failed is not None:
            code = int(self._processes[failed].returncode)
            return Failure(self._starts[failed].name, code, list(self._last[failed]))
        if not self._is_read:
            write(sys.stderr, b"the ranks were ended: nobody reads their output any more\n")
            raise BrokenPipeError
        return None

    def end(self, first: signal.Signals = signal.SIGTERM) -> None:
        """Ends the processes that still run: by the signal, then SIGTERM, and at last SIGKILL.

        Another Ctrl-C kills them at once.
        """
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        interrupts = self._told.count(signal.SIGINT)
        for each in dict.fromkeys((first, signal.SIGTERM)):
            if self._told.count(signal.SIGINT) == interrupts:
                self._signal(each, _has_no_input)
                self._await_all(lambda: self._told.count(signal.SIGINT) > interrupts)
        self._signal(signal.SIGKILL, _has_no_input)
        if self._told.count(signal.SIGINT) > interrupts:
            # One that has an input kills its own processes then.
            self._signal(signal.SIGINT, lambda process: not _has_no_input(process))
            self._await_all(lambda: False)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        end = time.monotonic() + _PATIENCE  # a process may have left the group with its output
        for reader in self._readers:
            reader.join(max(0.0, end - time.monotonic()))

    def _await_all(self, stop: Callable[[], bool]) -> None:
        end = time.monotonic() + self._grace
        while self._is_running():
            if stop() or time.monotonic() > end:
                break
            time.sleep(_LOOK)

    def _is_running(self) -> bool:
        """Whether a process runs, or one that it has started, which may still be saving."""
        if any(_exit_code(process) is None for process in self._processes):
            return True
        return not {process.pid for process in self._processes}.isdisjoint(_running_groups())

    def _signal(
        self,
        number: signal.Signals,
        which: Callable[[subprocess.Popen[bytes]], bool] = lambda _: True,
    ) -> None:
        for process in filter(which, self._processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
                os.killpg(process.pid, signal.SIGCONT)  # a stopped process acts on it then

    def _copy(self, number: int, source: IO[bytes], to: Any) -> None:
        rest, after_return = b"", False
        while piece := os.read(source.fileno(), _LINE):
            text = piece[1:] if after_return and piece.startswith(b"\n") else piece
            after_return = piece.endswith(b"\r")
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            *lines, rest = (rest + text).split(b"\n")
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
                if not write(to, prefix + line + b"\n"):
                    self._is_read = False


def write(to: Any, text: bytes) -> bool:
    """Writes bytes as they are, whatever the encoding of the stream.

    Returns:
        False if the stream is a pipe that nobody reads any more. Other errors lose the text.
    """
    if to is None:  # the process was started with it closed
        return True
    try:
        to.flush()
        while text:
            try:
                text = text[os.write(to.fileno(), text) :]
            except BlockingIOError:  # another process has set this for the file that they share
                select.select([], [to.fileno()], [])
    except BrokenPipeError:
        return False
    except (OSError, ValueError):
        pass
    return True


def _running_groups() -> Iterator[int]:
    """Yields the groups of the processes of this machine that have not ended."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            text = pathlib.Path("/proc", name, "stat").read_text("utf-8", "replace")
            state, _, group = text.rpartition(") ")[2].split()[:3]
            if state not in "ZX":
                yield int(group)


def _has_no_input(process: subprocess.Popen[bytes]) -> bool:
    return process.stdin is None


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Returns the exit code as `Popen` has it, and None while the process runs.

    Until `Popen.wait`, no other process or group can have its number.
    """
    if process.returncode is not None:
        return int(process.returncode)
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


@contextlib.contextmanager
def told_to_end() -> Iterator[list[int]]:
    """Inside, SIGINT, SIGTERM and SIGHUP do not end this process; a list has those that came.

    What the process ignores, such as SIGHUP by nohup, it goes on to ignore.
    """
    told: list[int] = []
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda came, _: told.append(came))
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin() -> None:
    """Called in the new process, which becomes the first of a group.

    If the launcher is killed, the system sends it SIGTERM.
    """
    os.setpgid(0, 0)
    with contextlib.suppress(AttributeError):
        _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, of Linux

"""Control of recorder.c by the process that is recorded."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import shutil
import subprocess

from replay import Kind

HERE = pathlib.Path(__file__).resolve().parent


def compile_recorder(folder: pathlib.Path) -> pathlib.Path:
    """Compiles the recorder; returns the library to preload."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    assert compiler is not None
    library = folder / "recorder.so"
    sources = [str(HERE / name) for name in ("recorder.c", "recorded_calls.c")]
    flags = ["-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command = [compiler, *flags, "-o", str(library), *sources, "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


class Recorder:
    """The recorder that this process was started with."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])

    def start(self, folder: pathlib.Path, trace: pathlib.Path) -> None:
        """Records the changes of a folder. A trace that exists is continued."""
        assert self._library.recorder_start(os.fsencode(folder), os.fsencode(trace)) == 0

    def stop(self) -> None:
        self._library.recorder_stop()

    def mark(self, **event: object) -> None:
        """Puts a JSON object into the trace."""
        self._library.recorder_mark(json.dumps(event).encode())

    def fail(self, kind: Kind, pattern: str, error: int, number: int = 1) -> None:
        """Makes call `number`, from 1, of a kind fail, on a path that matches (fnmatch)."""
        self._library.recorder_fail(int(kind), pattern.encode(), number, error)

    @property
    def waits(self) -> bool:
        """Whether the call that should fail has not come."""
        return bool(self._library.recorder_waits())

    def kill(self, after: int) -> None:
        """Kills the process after some more changes."""
        self._library.recorder_kill(ctypes.c_long(after))

"""Processes that begin with TensorFlow imported, which takes seconds.

`run` is like subprocess.run with the interpreter of the tests, but the process is a fork of one
that has imported TensorFlow and Keras, and has used neither. Not for tests of imports, nor for
tests in which two runs should differ in what Python chooses at its start, such as hash values.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pathlib
import runpy
import select
import subprocess
import sys
import tempfile
import types


def run(
    arguments: list[str], cwd: object = ".", timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with arguments that are a script's, or begin with -c or -m."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, name) for name in ("out", "err")]
        request = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": os.path.abspath(str(cwd)),
            "environment": {**os.environ, **environment},
            "files": [str(file) for file in files],
        }
        zygote = _zygote()
        assert zygote.stdin
        assert zygote.stdout
        print(json.dumps(request), file=zygote.stdin, flush=True)
        if not select.select([zygote.stdout], [], [], timeout)[0]:
            _end(zygote)
            _zygote.cache_clear()
            raise subprocess.TimeoutExpired(arguments, timeout)
        status = int(zygote.stdout.readline())
        return subprocess.CompletedProcess(
            arguments, status, *(file.read_text(errors="replace") for file in files)
        )


def run_cold(
    arguments: list[str], cwd: object = ".", timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same in a process that has imported nothing."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=str(cwd),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@functools.cache
def _zygote() -> subprocess.Popen[str]:
    zygote = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, zygote)
    return zygote


def _end(zygote: subprocess.Popen[str]) -> None:
    """Ends it and what it has started."""
    if zygote.poll() is None:
        os.killpg(zygote.pid, 9)
        zygote.wait()


def _serve() -> dict | None:
    """Forks a process for each request. Returns its request in it; None at the end of requests."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _prepare(request: dict) -> None:
    """Makes this process one that has just begun."""
    import numpy as np

    np.random.seed()  # noqa: NPY002  (Python's own generator is seeded by fork)
    for number, name in enumerate(["/dev/null", *request["files"]]):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]


def _run(first: str, *others: str) -> None:
    if first == "-c":
        sys.argv = ["-c", *others[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv = list(others)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    sys.path.pop(0)  # the folder of this file
    if request := _serve():
        _prepare(request)
        _run(*request["arguments"])

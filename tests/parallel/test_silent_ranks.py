"""Ranks that say nothing more, but whose connections stay: a stopped process, and a cut link.

A rank that waits for them gets an error that names them, within the timeout of `init`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from parallel import launch

pytestmark = pytest.mark.slow

TIMEOUT = 6  # of `init`, in seconds
LIMIT = 150

# Each rank exchanges numbers until that fails, writes the error to a file, and waits for the files
# of the others, so that no launcher ends them sooner.
SCRIPT = """
import json, os, pathlib, signal, sys, time

import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator

engine, timeout, place, silent = json.loads(sys.argv[1])
folder = pathlib.Path(__file__).parent
de.init(engine, timeout=timeout, **place)
comm = communicator.get()


@tf.function
def exchange(step):
    return comm.alltoall(tf.fill([4 * comm.size], step), tf.fill([comm.size], 4), "numbers")


def write(name, **content):
    (folder / "partial").mkdir(exist_ok=True)
    partial = folder / "partial" / f"{name}.{comm.rank}"
    partial.write_text(json.dumps(content))
    partial.rename(folder / f"{name}.{comm.rank}")


def wait_for(name, ranks):
    while not all((folder / f"{name}.{rank}").exists() for rank in ranks):
        time.sleep(0.01)


try:
    for step in range(10**6):
        begin = time.monotonic()
        exchange(tf.constant(step))
        if step == 20:
            write("ready")
            if comm.rank in silent:
                os.kill(os.getpid(), signal.SIGSTOP)
except tf.errors.OpError as error:
    write("error", waited=time.monotonic() - begin, text=error.message)
    wait_for("error", set(range(comm.size)) - set(silent))
os._exit(3)
"""


def written(folder):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return str(script)


def wait_for(folder, name, ranks):
    deadline = time.monotonic() + LIMIT
    while len(list(folder.glob(f"{name}.*"))) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def errors(folder, seconds=3 * TIMEOUT):
    """The errors of ranks, by rank; each came in time."""
    found = {}
    for path in folder.glob("error.*"):
        error = json.loads(path.read_text())
        # One message is awaited, or one of the engine's own looks is due, after another.
        assert error["waited"] < seconds, error
        found[int(path.suffix[1:])] = error["text"]
    return found


def named(text):
    """The ranks that an error says have done nothing."""
    match = re.search(r"alltoall 'numbers' on rank \d: ranks? ([\d, ]+) ha(?:s|ve) ", text)
    assert match is not None, text
    return {int(rank) for rank in match[1].split(",")}


@pytest.mark.parametrize("engine", launch.ENGINES)
def test_a_rank_that_is_stopped(tmp_path, engine):
    reason = launch.missing(engine)
    if reason is not None:
        pytest.skip(reason)
    arguments = json.dumps([engine, TIMEOUT, {}, [1]])
    ended = launch.run(
        engine,
        3,
        [sys.executable, written(tmp_path), arguments],
        tmp_path / "log",
        LIMIT,
        HOROVOD_GLOO_TIMEOUT_SECONDS="20",  # also for ranks to come
    )
    assert ended.status, ended.tail()
    found = errors(tmp_path, 60 if engine == "horovod" else 3 * TIMEOUT)
    assert found.keys() == {0, 2}, ended.tail()
    for text in found.values():
        if engine == "horovod":
            assert "Horovod has been shut down" in text
        else:
            # Of two that wait for each other too, the first one names both, and the other one it.
            assert 1 in named(text)


@pytest.fixture
def two_networks():
    """Two connected network namespaces: the commands that run in each, and a function that cuts."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    spaces = [f"dynemb{os.getpid()}{side}" for side in "ab"]
    links = [f"d{os.getpid()}{side}" for side in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        try:
            for space in spaces:
                ip("netns", "add", space)
                stack.callback(ip, "netns", "del", space)
            pair = ["type", "veth", "peer", "name", links[1], "netns", spaces[1]]
            ip("link", "add", links[0], "netns", spaces[0], *pair)
            for number, (space, link) in enumerate(zip(spaces, links, strict=True), 1):
                ip("-n", space, "address", "add", f"10.99.7.{number}/24", "dev", link)
                for each in (link, "lo"):
                    ip("-n", space, "link", "set", each, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
        yield (
            [["ip", "netns", "exec", space] for space in spaces],
            lambda: ip("-n", spaces[0], "link", "set", links[0], "down"),
        )


def test_a_link_that_is_cut(tmp_path, two_networks):
    """Two ranks on each side. Each side names ranks of the other one."""
    networks, cut = two_networks
    script = written(tmp_path)
    ranks = []
    try:
        for rank in range(4):
            place = {"rank": rank, "size": 4, "address": "10.99.7.1:29400"}
            command = [sys.executable, script, json.dumps(["gloo", TIMEOUT, place, []])]
            ranks.append(
                subprocess.Popen(
                    [*networks[rank // 2], *command], env={**os.environ, **launch.ENVIRONMENT}
                )
            )
        wait_for(tmp_path, "ready", 4)
        cut()
        for process in ranks:
            assert process.wait(LIMIT) == 3
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    found = errors(tmp_path)
    assert found.keys() == {0, 1, 2, 3}
    for side, beyond in (({0, 1}, {2, 3}), ({2, 3}, {0, 1})):
        assert any(named(found[rank]) & beyond for rank in side), found

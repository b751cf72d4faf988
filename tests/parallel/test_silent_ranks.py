"""Ranks that say nothing more: a stopped process, a cut link, and a killed process.

A rank that waits for them gets an error that names them, within the timeout of `init`; at once, if
they have ended. Hosts are namespaces of this machine, whose names differ: ranks share memory only
with ranks of the same name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
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
import json, os, pathlib, random, sys, threading, time

import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator

engine, timeout, place, silent, number, size = json.loads(sys.argv[1])
folder = pathlib.Path(__file__).parent
# On a busy machine, imports take longer on one rank than the timeout.
(folder / f"imported.{os.getpid()}").touch()
while len(list(folder.glob("imported.*"))) < size:
    time.sleep(0.05)
de.init(engine, timeout=timeout, **place)
comm = communicator.get()


@tf.function(reduce_retracing=True)
def exchange(step, rows):
    data = tf.fill([rows * comm.size], step)
    return comm.alltoall(data, tf.fill([comm.size], rows), "numbers")


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
        # With their announcement, after it and forwarded, and after it but not forwarded.
        exchange(tf.constant(step), tf.constant((4, 5_000, 50_000)[step % 3]))
        if step == 20:
            write("ready")
            if comm.rank in silent:
                moment = random.Random(number).uniform(0, 0.05)
                threading.Timer(moment, os.kill, (os.getpid(), number)).start()
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
    arguments = json.dumps([engine, TIMEOUT, {}, [1], signal.SIGSTOP, 3])
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
def two_hosts():
    """The commands by which processes run on two machines, to judge by their names."""
    name = 'echo $1 >/proc/sys/kernel/hostname && shift && exec "$@"'
    hosts = [["unshare", "--uts", "sh", "-c", name, "sh", f"host-{side}"] for side in "ab"]
    if shutil.which("unshare") is None or subprocess.run([*hosts[0], "true"]).returncode:
        pytest.skip("namespaces are not permitted")
    return hosts


def start(prefix, script, rank, size, address, silent, number):
    """Starts a rank in a namespace."""
    place = {"rank": rank, "size": size, "address": address}
    arguments = json.dumps(["gloo", TIMEOUT, place, silent, number, size])
    environment = {**os.environ, **launch.ENVIRONMENT}
    return subprocess.Popen([*prefix, sys.executable, script, arguments], env=environment)


def end(ranks):
    for process in ranks:
        process.kill()  # also if it is stopped
        process.wait()


@pytest.mark.parametrize("layout", ["aaab", "aabb", "aaaa"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_of_two_hosts(tmp_path, two_hosts, number, layout):
    """Rank 1 is killed or stopped at any moment of its exchanges."""
    script = written(tmp_path)
    ranks = []
    try:
        for rank, side in enumerate(layout):
            prefix = two_hosts["ab".index(side)]
            ranks.append(start(prefix, script, rank, 4, "127.0.0.1:29401", [1], number))
        for rank, process in enumerate(ranks):
            if rank != 1:
                assert process.wait(LIMIT) == 3
    finally:
        end(ranks)
    found = errors(tmp_path)
    assert found.keys() == {0, 2, 3}
    for text in found.values():
        if number == signal.SIGKILL:
            assert re.search(r"rank 1 has ended, or its connection is lost", text), text
        else:
            assert 1 in named(text), text


@pytest.fixture
def two_networks(two_hosts):
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
            [
                ["ip", "netns", "exec", space, *host]
                for space, host in zip(spaces, two_hosts, strict=True)
            ],
            lambda: ip("-n", spaces[0], "link", "set", links[0], "down"),
        )


def test_a_link_that_is_cut(tmp_path, two_networks):
    """Two ranks on each side. Each side names ranks of the other one."""
    networks, cut = two_networks
    script = written(tmp_path)
    ranks = []
    try:
        for rank in range(4):
            prefix = networks[rank // 2]
            ranks.append(start(prefix, script, rank, 4, "10.99.7.1:29400", [], 0))
        wait_for(tmp_path, "ready", 4)
        cut()
        for process in ranks:
            assert process.wait(LIMIT) == 3
    finally:
        end(ranks)
    found = errors(tmp_path)
    assert found.keys() == {0, 1, 2, 3}
    for side, beyond in (({0, 1}, {2, 3}), ({2, 3}, {0, 1})):
        assert any(named(found[rank]) & beyond for rank in side), found

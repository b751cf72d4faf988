"""Faults of ranks and links, on each engine: the error that the other ranks get, and when.

The error names the operation and the ranks, and comes within the timeout of `init`. What an engine
cannot do is said where it is tested.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from parallel import launch

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).resolve().parent / "faulty_rank.py"
TIMEOUT = 10  # of `init`, in seconds; on a busy machine, ranks need some to meet
LIMIT = 150


def command(folder, engine, ranks, fault="", faulty=(), **place):
    """The command of a rank."""
    options = {
        "engine": engine,
        "timeout": TIMEOUT,
        "place": place,
        "size": ranks,
        "fault": fault,
        "faulty": faulty,
        "folder": str(folder),
    }
    return [sys.executable, str(SCRIPT), json.dumps(options)]


def wait_for(folder, name, ranks):
    deadline = time.monotonic() + LIMIT
    while len(list(folder.glob(f"{name}.*"))) < ranks:
        assert time.monotonic() < deadline, (folder / "log").read_text(errors="replace")
        time.sleep(0.05)


def errors(folder, seconds=3 * TIMEOUT):
    """The errors of ranks, by rank; each came in time."""
    found = {}
    for path in folder.glob("error.*"):
        error = json.loads(path.read_text())
        # One message is awaited, or one of the engine's own looks is due, after another. A rank
        # that is late waits, too.
        assert error["waited"] < seconds + 3 * TIMEOUT, error
        found[int(path.suffix[1:])] = error["text"]
    return found


def named(text):
    """The ranks that an error says have done nothing."""
    match = re.search(r"alltoall 'numbers' on rank \d: ranks? ([\d, ]+) ha(?:s|ve) ", text)
    assert match is not None, text
    return {int(rank) for rank in match[1].split(",")}


# The errors by Gloo and MPI. Where two ranks wait for each other too, the first one that gives up
# names both, and the other one, to which it says so, has its error.
# Beside rank 1, the other rank that waits for it, in any order.
SILENT = (
    r"alltoall 'numbers' on rank [02]: "
    r"(rank 1 has|ranks (1, [02]|[02], 1) have) {} nothing for 10 s"
)
NAMED = {
    (
        "gloo",
        "kill",
    ): r"alltoall 'numbers' on rank [02]: rank 1 has ended, or its connection is lost",
    "kill": SILENT.format("sent"),
    # It depends on the moment.
    "stop": SILENT.format("(sent|received)"),
    "full": SILENT.format("(sent|received)"),
    "late": SILENT.format("sent"),
    "order": SILENT.format("sent") + "|allgather 'another' on rank 1: ranks 0, 2 have sent nothing",
    ("gloo", "absent"): r"ranks 1 of 3 have not come to 127.0.0.1:\d+ within 10 s",
    # No rank of MPI knows which one is missing.
    "absent": "MPI has not started for 10 s: not all ranks have started",
}
FAULTS = ("kill", "stop", "full", "late", "order", "absent")
# Without --all-ranks: the others take minutes. tests/cc/ranks_test has them on Gloo.
USUAL = {"gloo": ("kill", "stop", "absent"), "mpi": ("kill", "stop"), "horovod": ("kill",)}
HOROVODS = (
    r"Horovod has been shut down|Timed out waiting \d+ms for|[Cc]onnection (reset|closed) by peer"
)
# Horovod's settings, instead of the timeout of `init`, and what it says.
HOROVOD = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "20",  # also for ranks to come
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2",
}


def pytest_generate_tests(metafunc):
    if {"engine", "fault"} <= set(metafunc.fixturenames):
        engines = ("horovod",) if "horovod" in metafunc.function.__name__ else ("gloo", "mpi")
        every = metafunc.config.getoption("--all-ranks")
        cases = [(e, fault) for e in engines for fault in (FAULTS if every else USUAL[e])]
        metafunc.parametrize(("engine", "fault"), cases)


def test_the_fault_of_a_rank_is_an_error_that_names_it(tmp_path, engine, fault):
    skip_without(engine)
    # Otherwise mpiexec ends the ranks when one is killed, before they have an error. It does so at
    # times nevertheless, also when one of them has its error already.
    options = ["-disable-auto-cleanup"] if (engine, fault) == ("mpi", "kill") else []
    ended = launch.run(
        engine,
        3,
        command(tmp_path, engine, 3, fault, [1]),
        tmp_path / "log",
        LIMIT,
        options=options,
    )
    assert ended.status, ended.tail()
    found = errors(tmp_path)
    survivors = {0, 1, 2} if fault in ("late", "order") else {0, 2}
    assert found.keys() <= survivors if options else found.keys() == survivors, ended.tail()
    for text in found.values():
        assert re.search(NAMED.get((engine, fault)) or NAMED[fault], text), text


def test_mpiexec_ends_the_ranks_when_one_is_killed(tmp_path):
    skip_without("mpi")
    ended = launch.run("mpi", 3, command(tmp_path, "mpi", 3, "kill", [1]), tmp_path / "log", LIMIT)
    assert ended.status == 9, ended.tail()


def test_the_fault_of_a_rank_on_horovod(tmp_path, engine, fault):
    """The error names nothing. If a rank does not call, Horovod writes its number and the name."""
    skip_without(engine)
    ended = launch.run(
        engine,
        3,
        command(tmp_path, engine, 3, fault, [1]),
        tmp_path / "log",
        LIMIT,
        **HOROVOD,
    )
    assert ended.status, ended.tail()
    found = errors(tmp_path, 60)
    if fault == "absent":  # it ends the process
        assert found == {}
        assert "Wait timeout after 20 seconds for key(s): 1." in ended.output
        return
    if fault == "kill":  # horovodrun ends the others soon
        assert found.keys() <= {0, 2}
        assert "Process 1 exit with status code 137" in ended.output, ended.tail()
    else:
        assert found.keys() >= {0, 2}, ended.tail()
    for text in found.values():
        # It depends on the moment.
        assert re.search(HOROVODS, text), text
    if fault in ("late", "order"):
        assert re.search(r"\b1!?: \[.*\bnumbers\b.*\]", ended.output), ended.tail()


def skip_without(engine):
    reason = launch.missing(engine)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def two_hosts():
    """The commands by which processes run on two machines, to judge by their names.

    Ranks share memory only with ranks of the same machine.
    """
    name = 'echo $1 >/proc/sys/kernel/hostname && shift && exec "$@"'
    hosts = [["unshare", "--uts", "sh", "-c", name, "sh", f"host-{side}"] for side in "ab"]
    if shutil.which("unshare") is None or subprocess.run([*hosts[0], "true"]).returncode:
        pytest.skip("namespaces are not permitted")
    return hosts


def run_ranks(folder, commands, faulty, then=lambda: None, variables=lambda rank: {}):
    """Runs ranks by their commands, until all that are not faulty have their error."""
    ranks = []
    try:
        with (folder / "log").open("w") as log:
            for rank, words in enumerate(commands):
                environment = {**os.environ, **launch.ENVIRONMENT, **variables(rank)}
                ranks.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        wait_for(folder, "ready", len(commands))
        then()
        for rank, process in enumerate(ranks):
            if rank not in faulty:
                assert process.wait(LIMIT) == 3, (folder / "log").read_text(errors="replace")
    finally:
        for process in ranks:
            process.kill()  # also if it is stopped
            process.wait()


def placed(prefixes, folder, address, fault="", faulty=()):
    """The commands of ranks of Gloo, each after another prefix, which meet at an address."""
    size = len(prefixes)
    return [
        [*prefix, *command(folder, "gloo", size, fault, faulty, rank=r, size=size, address=address)]
        for r, prefix in enumerate(prefixes)
    ]


@pytest.mark.parametrize("layout", ["aaab", "aabb", "aaaa"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_the_fault_of_a_rank_of_two_hosts(tmp_path, two_hosts, fault, layout):
    prefixes = [two_hosts["ab".index(side)] for side in layout]
    run_ranks(tmp_path, placed(prefixes, tmp_path, "127.0.0.1:29401", fault, [1]), [1])
    found = errors(tmp_path)
    assert found.keys() == {0, 2, 3}
    for text in found.values():
        if fault == "kill":
            assert re.search(r"rank 1 has ended, or its connection is lost", text), text
        else:
            assert 1 in named(text), text


LINK = "between"  # the name of each end


def end_all_in(space):
    pids = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True).stdout
    for pid in map(int, pids.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def two_networks(two_hosts):
    """Two connected network namespaces: the commands that run in each, and a function that cuts."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    spaces = [f"dynemb{os.getpid()}{side}" for side in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        try:
            for space in spaces:
                ip("netns", "add", space)
                stack.callback(ip, "netns", "del", space)
                stack.callback(end_all_in, space)
                # `ip netns exec` puts this in the place of /etc/hosts.
                names = pathlib.Path("/etc/netns", space)
                names.mkdir(parents=True)
                stack.callback(shutil.rmtree, names)
                (names / "hosts").write_text(
                    "127.0.0.1 localhost\n10.99.7.1 host-a\n10.99.7.2 host-b\n"
                )
            ends = [[LINK, "netns", space] for space in spaces]
            ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
            for number, space in enumerate(spaces, 1):
                ip("-n", space, "address", "add", f"10.99.7.{number}/24", "dev", LINK)
                for each in (LINK, "lo"):
                    ip("-n", space, "link", "set", each, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
        yield (
            [
                ["ip", "netns", "exec", space, *host]
                for space, host in zip(spaces, two_hosts, strict=True)
            ],
            lambda: ip("-n", spaces[0], "link", "set", LINK, "down"),
        )


def check_sides(found):
    """Each side names ranks of the other one."""
    assert found.keys() == {0, 1, 2, 3}
    for side, beyond in (({0, 1}, {2, 3}), ({2, 3}, {0, 1})):
        assert any(named(found[rank]) & beyond for rank in side), found


def test_a_link_that_is_cut(tmp_path, two_networks):
    networks, cut = two_networks
    prefixes = [networks[0], networks[0], networks[1], networks[1]]
    run_ranks(tmp_path, placed(prefixes, tmp_path, "10.99.7.1:29400"), [], cut)
    check_sides(errors(tmp_path))


def test_a_link_of_mpi_that_is_cut(tmp_path, two_networks):
    skip_without("mpi")
    networks, cut = two_networks
    # MPICH would use the memory of the machine, whatever the names of hosts and networks.
    only_tcp = {
        "MPIR_CVAR_NOLOCAL": "1",
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": LINK,
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": LINK,
    }
    rank = command(tmp_path, "mpi", 4)
    words = [*launch.launcher("mpi", 2, ["-disable-auto-cleanup"]), *networks[0], *rank]
    words += [":", "-n", "2", *networks[1], *rank]
    environment = {**os.environ, **launch.ENVIRONMENT, **only_tcp}
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            wait_for(tmp_path, "ready", 4)
            name = f"/sys/class/net/{LINK}/statistics/tx_bytes"
            sent = subprocess.run([*networks[0], "cat", name], capture_output=True, check=True)
            if int(sent.stdout) < 1_000_000:
                pytest.skip("this MPI uses another way than the link")
            cut()
            launcher.wait(LIMIT)
        finally:
            launcher.kill()
            launcher.wait()
    check_sides(errors(tmp_path))


# Where Horovod's ranks meet, instead of horovodrun, which would need ssh.
MEETING = """
import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

server = RendezvousServer()
print(server.start(), flush=True)
server.init(get_host_assignments(parse_hosts("a:2,b:2"), 4))
sys.stdin.read()
"""


def test_a_link_of_horovod_that_is_cut(tmp_path, two_networks):
    """The errors name nothing."""
    skip_without("horovod")
    networks, cut = two_networks
    meeting = subprocess.Popen(
        [*networks[0], sys.executable, "-c", MEETING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    port = int(meeting.stdout.readline())

    def variables(rank):
        host, local = divmod(rank, 2)
        values = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local, "LOCAL_SIZE": 2}
        values |= {"CROSS_RANK": host, "CROSS_SIZE": 2, "HOSTNAME": "ab"[host]}
        values |= {"GLOO_RENDEZVOUS_ADDR": "10.99.7.1", "GLOO_RENDEZVOUS_PORT": port}
        values |= {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
        return HOROVOD | {f"HOROVOD_{name}": str(value) for name, value in values.items()}

    words = command(tmp_path, "horovod", 4)
    try:
        run_ranks(tmp_path, [[*networks[r // 2], *words] for r in range(4)], [], cut, variables)
    finally:
        meeting.communicate()  # closes its input
    found = errors(tmp_path, 60)
    assert found.keys() == {0, 1, 2, 3}
    for text in found.values():
        assert re.search(HOROVODS, text), text

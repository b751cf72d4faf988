"""`tf-dynemb run`: the ranks' variables, their output, and the end of all when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest

SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
print(json.dumps([os.environ[name] for name in names]))
print(os.environ["MASTER_PORT"], os.environ["TF_DYNEMB_RANKS_SECRET"], file=sys.stderr)
print(*sys.argv[1:])
"""


def command(*arguments):
    return [sys.executable, "-m", "tf_dynemb", "run", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def test_each_rank_has_its_place_and_a_prefix(script):
    ended = run("-np", 3, script(SCRIPT), "--port", "x", "-np", "9")
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines())
    places = [f'[{r}] ["{r}", "{r}", "3", "3", "127.0.0.1"]' for r in range(3)]
    assert lines == sorted([*places, *(f"[{r}] --port x -np 9" for r in range(3))])
    shared = {line.split("] ", 1)[1] for line in ended.stderr.splitlines()}
    assert len(shared) == 1
    assert len(shared.pop().split()) == 2


def test_a_port_of_ones_choice(script):
    ended = run("-np", 1, "--port", 1234, script(SCRIPT))
    assert ended.stderr.startswith("[0] 1234 ")


def test_a_program_that_is_no_script_of_python():
    ended = run("-np", 2, "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert sorted(ended.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_a_module(tmp_path, monkeypatch):
    (tmp_path / "package of ranks").mkdir()
    (tmp_path / "package of ranks" / "trains.py").write_text(SCRIPT)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(tmp_path / "package of ranks"), os.environ.get("PYTHONPATH", "")]),
    )
    ended = run("-np", 1, "-m", "trains", "-m", "--grace")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("[0] -m --grace\n")


def test_a_path_and_arguments_with_spaces(tmp_path, ssh):
    path = tmp_path / "a folder" / "a script.py"
    path.parent.mkdir()
    path.write_text("import sys\nprint(sys.argv[1:])\n")
    for hosts in ((), ("--hosts", "a", *ssh.arguments)):
        ended = run("-np", 1, *hosts, path, "a  b", "$HOME", "'")
        assert ended.stdout == "[0] ['a  b', '$HOME', \"'\"]\n", ended.stderr


def test_the_first_failure_ends_all_and_is_shown_last(script):
    begin = time.monotonic()
    ended = run(
        *("-np", 3),
        script(
            "import os, sys, time\n"
            "if os.environ['RANK'] == '1':\n"
            "    print('planted', file=sys.stderr)\n"
            "    sys.exit(7)\n"
            "time.sleep(1000)\n"
        ),
    )
    assert ended.returncode == 7
    assert ended.stderr.endswith("rank 1 failed first: exit code 7\n  planted\n")
    assert time.monotonic() - begin < 60


def test_a_failure_where_sigchld_is_ignored(script):
    path = script("import sys\nsys.exit(7)\n")
    ignore = lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # noqa: E731
    with started("-np", 1, path, begin=ignore) as launcher:
        assert launcher.wait(60) == 7


def test_a_rank_that_a_signal_ends(script):
    ended = run(
        "-np", 2, script("import os\nif os.environ['RANK'] == '0': os.kill(os.getpid(), 9)")
    )
    assert ended.returncode == 128 + signal.SIGKILL
    assert "rank 0 failed first: ended by SIGKILL" in ended.stderr


def test_ranks_that_ignore_sigterm_are_killed(script):
    ended = run(
        *("-np", 2, "--grace", 1),
        script(
            "import os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if os.environ['RANK'] == '1': sys.exit(1)\n"
            "time.sleep(1000)\n"
        ),
    )
    assert ended.returncode == 1


# Rank 0 and a process that it has started stop. Both save when they are told to end, rank 0 first.
STOPPED = """
import os, pathlib, signal, sys, time

folder = pathlib.Path(sys.argv[1])

def save(name):
    if name == "child":
        time.sleep(0.5)
    (folder / f"{name} saved").touch()
    os._exit(0)

def state(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]

if os.environ["RANK"] == "0":
    child = os.fork()
    name = "rank" if child else "child"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: save(name))
    if child:
        while state(child) != "T":
            time.sleep(0.01)
        (folder / "written").write_text(f"{os.getpid()} {child}")
        (folder / "written").rename(folder / "stopped")
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
while not (folder / "stopped").exists():
    time.sleep(0.01)
while state((folder / "stopped").read_text().split()[0]) != "T":
    time.sleep(0.01)
if sys.argv[2] == "fails":
    sys.exit(3)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("hosts", [(), ("--hosts", "127.0.0.1"), ("--hosts", "a")], ids=str)
@pytest.mark.parametrize("how", ["fails", signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_processes_end_with_the_others(script, ssh, tmp_path, hosts, how):
    """A stopped process does not act on SIGTERM; SIGKILL would not let it save."""
    arguments = ("-np", 2, "--grace", 60, *hosts, *ssh.arguments, script(STOPPED), tmp_path, how)
    with started(*arguments) as launcher:
        if how != "fails":
            assert launcher.stdout.readline() == "[1] ready\n"
            launcher.send_signal(how)
        assert launcher.wait(150) == (3 if how == "fails" else 128 + how)
    assert {path.name for path in tmp_path.glob("* saved")} == {"rank saved", "child saved"}
    await_the_end(map(int, (tmp_path / "stopped").read_text().split()))


def test_a_rank_that_stops_when_it_is_told_to_end_is_killed(script):
    path = script(
        "import os, signal, time\n"
        "def stop(*_):\n"
        "    while True:\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    with started("-np", 1, "--grace", 1, path) as launcher:
        pid = int(launcher.stdout.readline().split()[1])
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM
    await_the_end([pid])


@pytest.mark.parametrize("hosts", [(), ("--hosts", "127.0.0.1"), ("--hosts", "a")], ids=str)
def test_a_second_interrupt_kills_the_ranks_at_once(script, ssh, hosts):
    path = script(
        "import os, signal, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, lambda *_: print('told', flush=True))\n"
        "print(os.getpid(), flush=True)\n"
        "while True:\n"
        "    time.sleep(1)\n"
    )
    with started("-np", 1, "--grace", 1000, *hosts, *ssh.arguments, path) as launcher:
        pid = int(launcher.stdout.readline().split()[1])
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "[0] told\n"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 128 + signal.SIGINT
        assert "Traceback" not in launcher.stderr.read()
    await_the_end([pid])


def test_processes_that_a_rank_has_started_end_with_it(script, tmp_path):
    path = script(
        "import os, pathlib, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(child.pid))\n"
        "if os.environ['RANK'] == '0': sys.exit(3)\n"
        "child.wait()\n"
    )
    begin = time.monotonic()
    assert run("-np", 2, path).returncode == 3
    assert time.monotonic() - begin < 25
    assert not any(is_running(int((tmp_path / str(rank)).read_text())) for rank in range(2))


def test_the_place_of_the_launcher_itself_is_not_that_of_its_ranks(script, monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    ended = run(
        "-np", 2, script("import os\nprint(os.environ['RANK'], os.environ.get('TF_CONFIG'))")
    )
    assert sorted(ended.stdout.splitlines()) == ["[0] 0 None", "[1] 1 None"]


def test_output_of_any_bytes(script, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    path = script(
        "import sys\n"
        "sys.stdout.buffer.write('a \u2713\\r10%\\r20%\\n'.encode() + b'\\xff\\n' + b'end')\n"
    )
    ended = subprocess.run(command("-np", 1, path), capture_output=True, timeout=60, check=True)
    assert ended.stdout == "[0] a \u2713\n[0] 10%\n[0] 20%\n".encode() + b"[0] \xff\n[0] end\n"


def test_ends_of_lines_of_other_systems(script):
    path = script(
        "import sys, time\n"
        "for text in (b'a\\r\\nb\\r', b'\\nc\\r', b'd\\n\\ne\\r\\n'):\n"
        "    sys.stdout.buffer.write(text)\n"
        "    sys.stdout.buffer.flush()\n"
        "    time.sleep(0.5)\n"
    )
    ended = subprocess.run(command("-np", 1, path), capture_output=True, timeout=60, check=True)
    assert ended.stdout == b"[0] a\n[0] b\n[0] c\n[0] d\n[0] \n[0] e\n"


def test_a_long_line(script):
    path = script("import sys\nsys.stdout.write('x' * 1_000_000)\n")
    ended = run("-np", 1, path)
    assert ended.returncode == 0
    assert all(line.startswith("[0] x") for line in ended.stdout.splitlines())
    assert ended.stdout.count("x") == 1_000_000


# More than a pipe keeps.
MUCH = "import sys\nfor i in range(20_000): print('line', i, file=sys.stdout)\nprint('end')\n"


def test_a_reader_that_closes_the_pipe_ends_the_ranks(script):
    path = script("import os, time\nprint(os.getpid())\nwhile True: print('x'), time.sleep(0.01)\n")
    with started("-np", 2, path) as launcher:
        pid = int(launcher.stdout.readline().split()[1])
        launcher.stdout.close()
        assert launcher.wait(60) == 141
        assert (
            launcher.stderr.read() == "the ranks were ended: nobody reads their output any more\n"
        )
    await_the_end([pid])


def test_a_failure_is_that_of_the_rank_if_nobody_reads_the_output(script):
    path = script("import sys, time\nprint('a')\ntime.sleep(2)\nprint('b')\nsys.exit(7)\n")
    with started("-np", 1, path) as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(60) in (7, 141)  # whichever the launcher has seen first


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_launcher_without_an_output(script, closed):
    path = script(MUCH + "print('x' * 1_000_000, file=sys.stderr)\n")
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command("-np", 1, path)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0


def test_an_output_that_does_not_block_loses_nothing(script):
    """Other programs set this for a terminal or pipe that they share with the launcher."""
    source, to = os.pipe()
    os.set_blocking(to, False)
    with started("-np", 1, script(MUCH), stdout=to) as launcher:
        os.close(to)
        time.sleep(2)  # the pipe is full
        with open(source) as pipe:
            lines = pipe.read().splitlines()
        assert launcher.wait(60) == 0
    assert lines == [*(f"[0] line {i}" for i in range(20_000)), "[0] end"]


def test_no_other_process_has_the_number_of_a_rank_that_has_ended(script, tmp_path):
    """The launcher ends the group of each rank by its number."""
    path = script(
        "import os, pathlib, sys, time\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if os.environ['RANK'] == '0':\n"
        "    first.with_suffix('.new').write_text(str(os.getpid()))\n"
        "    first.with_suffix('.new').rename(first)\n"
        "    sys.exit(0)\n"
        "while not first.exists():\n"
        "    time.sleep(0.01)\n"
        "state = pathlib.Path('/proc', first.read_text(), 'stat')\n"
        "while state.read_text().rpartition(') ')[2][0] != 'Z':\n"
        "    time.sleep(0.001)\n"
        "time.sleep(1)\n"
        "state.read_text()\n"
    )
    ended = run("-np", 2, path)
    assert ended.returncode == 0, ended.stderr


def test_a_script_that_does_not_call_init(script):
    path = script("import tf_dynemb as de\nde.DynamicVariable(2)\n")
    ended = run("-np", 2, path)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert f"Rank {rank} of 2 creates a table before" in ended.stderr
    assert "trains alone" not in run("-np", 1, path).stderr


def test_a_script_that_saves_when_it_is_ended(script, tmp_path):
    path = script(
        "import pathlib, signal, time\n"
        "def save(*_):\n"
        "    time.sleep(6)\n"
        f"    pathlib.Path({str(tmp_path / 'saved')!r}).write_text('')\n"
        "    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready')\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen(command("-np", 1, path), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "[0] ready\n"
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_the_end_of_the_launcher_ends_the_ranks(script, number):
    path = script(
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with started("-np", 2, path) as launcher:
        pids = [list(map(int, launcher.stdout.readline().split()[1:])) for _ in range(2)]
        launcher.send_signal(number)
        launcher.wait(30)
    await_the_end(rank for rank, _ in pids)
    if number == signal.SIGKILL:  # the system tells the ranks only
        for _, child in pids:
            os.kill(child, signal.SIGKILL)
    await_the_end(child for _, child in pids)


def test_nohup(script, tmp_path):
    path = script(
        "import os, pathlib, time\n"
        "print('ready', flush=True)\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n"
        "    time.sleep(0.01)\n"
    )
    with started("-np", 1, path, begin=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as it:
        assert it.stdout.readline() == "[0] ready\n"
        it.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        (tmp_path / "go").touch()
        assert it.wait(30) == 0


@contextlib.contextmanager
def started(*arguments, begin=lambda: None, stdout=subprocess.PIPE):
    """Starts a launcher, and ends it."""

    def prepare():
        # A shell lets programs in the background ignore SIGINT, and nohup SIGHUP.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        begin()

    with subprocess.Popen(
        command(*arguments),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def await_the_end(pids):
    """Waits for processes to end; kills those that do not."""
    left, end = set(pids), time.monotonic() + 30
    while left and time.monotonic() < end:
        left = set(filter(is_running, left))
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-np", 0, "x.py"), "-np must be 1 or more, got 0"),
        (("-np", 2), "no script is named"),
        (("-np", 2, "--"), "no script is named"),
        (("-np", 2, "-m"), "no script is named"),
        (("-np", 2, "no_such_program"), "no_such_program"),
        (("-np", 2, "--port", 70000, "x.py"), "--port must be in [0, 65535], got 70000"),
        (("-np", 2, "--grace", -1, "x.py"), "--grace must be in [0, 1e9) seconds, got -1"),
        (("-np", 2, "--grace", "nan", "x.py"), "--grace must be in [0, 1e9) seconds, got nan"),
        (("x.py",), "-np"),
    ],
)
def test_arguments_without_meaning(arguments, message):
    ended = run(*arguments)
    assert ended.returncode == 2
    assert message in ended.stderr


SSH = """#!/bin/sh
# The program that stands in for ssh: any "machine" is this one, without a variable of this one.
echo "$1" >> {log}
shift
exec env -u TF_DYNEMB_RANKS_TLS_CA sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path):
    """The arguments for a stand-in for ssh; `hosts` are the machines that it was called for."""
    program, log = tmp_path / "ssh", tmp_path / "hosts"
    program.write_text(SSH.format(log=log))
    program.chmod(0o755)
    return types.SimpleNamespace(
        arguments=("--ssh", program), hosts=lambda: sorted(log.read_text().split())
    )


def test_ranks_on_several_machines(script, ssh):
    path = script(
        "import json, os\n"
        "names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'WORLD_SIZE')\n"
        "names += 'MASTER_ADDR', 'X', 'Y'\n"
        "print(json.dumps([os.environ[name] for name in names]))\n"
    )
    os.environ["Y"] = "z z"
    ended = run("-np", 5, "--hosts", "a:2,b:4", *ssh.arguments, "-x", "X=1 2", "-x", "Y", path)
    del os.environ["Y"]
    assert ended.returncode == 0, ended.stderr
    assert ssh.hosts() == ["a", "b"]
    places = [(0, 0, 2), (1, 1, 2), (2, 0, 3), (3, 1, 3), (4, 2, 3)]
    assert sorted(ended.stdout.splitlines()) == [
        f'[{rank}] ["{rank}", "{local}", "{num}", "5", "a", "1 2", "z z"]'
        for rank, local, num in places
    ]


def test_ranks_of_several_machines_meet(script, ssh):
    """This machine needs no ssh; the others are at its other addresses."""
    path = script(
        "import tensorflow as tf\n"
        "import tf_dynemb as de\n"
        "from tf_dynemb import communicator\n"
        "de.init()\n"
        "comm = communicator.get()\n"
        "print(comm.allgather(tf.constant([comm.rank]), 'ranks').numpy())\n"
    )
    hosts = "127.0.0.1,127.0.0.2"
    ended = run("-np", 3, "--hosts", hosts, *ssh.arguments, path)
    assert ended.returncode == 0, ended.stderr
    assert ssh.hosts() == ["127.0.0.2"]
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] [0 1 2]" for rank in range(3)]


def test_the_files_of_tls_are_those_of_the_launcher(script, ssh, monkeypatch):
    """Not of the machine: ranks there would be without encryption, or with other files."""
    path = script("import os\nprint(os.environ['TF_DYNEMB_RANKS_TLS_CA'])\n")
    monkeypatch.setenv("TF_DYNEMB_RANKS_TLS_CA", "of the launcher")
    hosts = ("-np", 2, "--hosts", "a,b", *ssh.arguments)
    for given, expected in ((), "of the launcher"), (("-x", "TF_DYNEMB_RANKS_TLS_CA=x"), "x"):
        ended = run(*hosts, *given, path)
        assert ended.returncode == 0, ended.stderr
        assert sorted(ended.stdout.splitlines()) == [f"[0] {expected}", f"[1] {expected}"]


def test_no_secret_is_on_a_command_line(script, ssh):
    ended = run(
        *("-np", 2, "--hosts", "a,b", *ssh.arguments),
        script(
            "import os, subprocess\n"
            "shown = subprocess.check_output(['ps', '-axww', '-o', 'args'], text=True)\n"
            "print(os.environ['TF_DYNEMB_RANKS_SECRET'] in shown, 'launcher.host' in shown)\n"
        ),
    )
    assert sorted(ended.stdout.splitlines()) == ["[0] False True", "[1] False True"]


def test_a_rank_that_fails_on_another_machine(script, ssh):
    ended = run(
        *("-np", 2, "--hosts", "a,b", *ssh.arguments),
        script(
            "import os, sys, time\n"
            "if os.environ['RANK'] == '1':\n"
            "    print('planted', file=sys.stderr)\n"
            "    os.kill(os.getpid(), 9)\n"
            "time.sleep(1000)\n"
        ),
    )
    assert ended.returncode == 128 + signal.SIGKILL
    last = ended.stderr[ended.stderr.rindex("host b failed first") :].splitlines()
    assert last[-2:] == ["  rank 1 failed first: ended by SIGKILL", "    planted"]


def test_a_machine_that_is_not_reached(script, tmp_path):
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\necho "no route to $1" >&2\nexit 255\n')
    program.chmod(0o755)
    ended = run("-np", 2, "--hosts", "a,b", "--ssh", program, script("import time\ntime.sleep(99)"))
    assert ended.returncode == 255
    assert "failed first: exit code 255\n  no route to" in ended.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_on_other_machines_end_with_the_launcher(script, ssh, tmp_path, how):
    path = script(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid()))\n"
        "print('ready')\n"
        "time.sleep(1000)\n"
    )
    arguments = command("-np", 2, "--hosts", "a,b", *ssh.arguments, path)
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as launcher:
        assert sorted(launcher.stdout.readline() for _ in range(2)) == [
            "[0] ready\n",
            "[1] ready\n",
        ]
        launcher.send_signal(how)
        launcher.wait(60)
        numbers = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
        end = time.monotonic() + 60
        while any(map(is_running, numbers)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(is_running, numbers))


def test_all_ranks_are_started_again(script, tmp_path):
    path = script(
        "import os, pathlib, sys\n"
        "number, rank = os.environ['TF_DYNEMB_RESTART'], os.environ['RANK']\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / f'{number}-{rank}').write_text(os.environ['TF_DYNEMB_RANKS_SECRET'])\n"
        "sys.exit(7 if number != '2' and rank == '1' else 0)\n"
    )
    ended = run("-np", 2, "--restart", 3, path)
    assert ended.returncode == 0
    assert ended.stderr.count("rank 1 failed first: exit code 7") == 2
    assert "starting all ranks again: 1 of 3\n" in ended.stderr
    assert "starting all ranks again: 2 of 3\n" in ended.stderr
    secrets = {(tmp_path / f"{number}-0").read_text() for number in range(3)}
    assert len(secrets) == 3
    assert not (tmp_path / "3-0").exists()
    ended = run("-np", 2, "--restart", 1, path)
    assert ended.returncode == 7
    assert ended.stderr.endswith("rank 1 failed first: exit code 7\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "a:x"), "--hosts must be"),
        (("--hosts", "a,,b"), "--hosts must be"),
        (("--hosts=-oProxyCommand=x",), "--hosts must be"),
        (("--hosts", "a:1,b"), "the ranks of all machines or of none"),
        (("--hosts", "a,a"), "names a machine twice"),
        (("--hosts", "a:1,b:1"), "has 2 ranks, fewer than -np 3"),
        (("--hosts", "localhost,b"), "other machines cannot reach 'localhost'"),
        (("--restart", -1), "--restart must be 0 or more"),
        (("-x", "NO_SUCH_VARIABLE"), "-x must be"),
        (("-x", "=1"), "-x must be"),
    ],
)
def test_invalid_arguments(arguments, message):
    ended = run("-np", 3, *arguments, "train.py")
    assert ended.returncode == 2
    assert message in ended.stderr

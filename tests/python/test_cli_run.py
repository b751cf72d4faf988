"""`tf-dynemb run`: the ranks' variables, their output, and the end of all when one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_launcher_ends_the_ranks(script, number):
    path = script("import os, time\nprint(os.getpid())\ntime.sleep(1000)\n")
    with subprocess.Popen(
        command("-np", 2, path),
        stdout=subprocess.PIPE,
        text=True,
        # A shell lets programs in the background ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as launcher:
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.send_signal(number)
        launcher.wait(30)
    end = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}/cmdline") and is_running(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


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
        (("-np", 2, "no_such_program"), "no_such_program"),
        (("x.py",), "-np"),
    ],
)
def test_arguments_without_meaning(arguments, message):
    ended = run(*arguments)
    assert ended.returncode == 2
    assert message in ended.stderr

"""`run`: starts a script as several ranks, on this machine or on others by ssh."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Sequence

from tf_dynemb.launcher.host import starts as starts_of_host
from tf_dynemb.launcher.processes import Processes, Start, told_to_end, write

# The port of the rendezvous on another machine, as torchrun's.
_PORT = 29500
# The variables that name the files for TLS between ranks.
_TLS = "TF_DYNEMB_RANKS_TLS_"
# The ranks of a machine that are told to end have this time more than they need at most.
_MORE = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "-np", "--ranks", type=int, required=True, metavar="N", help="the number of ranks"
    )
    parser.add_argument(
        "--hosts",
        metavar="HOST[:RANKS],...",
        help="the machines, which ssh reaches without a password; the first has rank 0, at a name "
        "that all of them reach. Without numbers, each gets as many ranks as the others. The "
        "script, this Python and the working directory have the same paths on all. Default: this "
        "machine",
    )
    parser.add_argument(
        "--ssh",
        default="ssh -o BatchMode=yes",
        metavar="COMMAND",
        help="the program that runs a command on another machine; default: %(default)s",
    )
    parser.add_argument(
        "-x",
        action="append",
        default=[],
        dest="variables",
        metavar="NAME[=VALUE]",
        help="a variable for the ranks; without a value, as it is here. Ranks on this machine have "
        "all variables, and those on others TF_DYNEMB_RANKS_TLS_*",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="the port at which the ranks meet, of the first host; default: a free one on this "
        f"machine, {_PORT} on another",
    )
    parser.add_argument(
        "--restart",
        type=int,
        default=0,
        metavar="N",
        help="if a rank fails, start all of them again, at most N times; TF_DYNEMB_RESTART is then "
        "the number of the start, from 0. The script loads what it has last saved",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long ranks, and what they have started, may take to end after SIGTERM or Ctrl-C; "
        "default: 30",
    )
    parser.add_argument(
        "-m",
        action="store_true",
        dest="is_module",
        help="SCRIPT is the name of a module, as in `python -m`",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGUMENT ...]",
        help="a script, run by this Python if its name ends with .py, and its arguments",
    )


def run(options: argparse.Namespace) -> int:
    """Runs a script as several ranks, which `init()` joins; prefixes their output.

    If a rank fails, all are ended, and the last lines of the one that failed first are shown again.
    The exit code is that rank's; for a rank that a signal has ended, 128 + the signal.
    """
    command = [word for i, word in enumerate(options.script) if (i, word) != (0, "--")]
    if options.ranks < 1:
        raise ValueError(f"-np must be 1 or more, got {options.ranks}.")
    if options.restart < 0:
        raise ValueError(f"--restart must be 0 or more, got {options.restart}.")
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port must be in [0, 65535], got {options.port}.")
    if not 0 <= options.grace < 1e9:
        raise ValueError(f"--grace must be in [0, 1e9) seconds, got {options.grace}.")
    if not command:
        raise ValueError("no script is named: tf-dynemb run -np 2 train.py")
    if options.is_module:
        command = [sys.executable, "-m", *command]
    hosts = _hosts(options.hosts, options.ranks) if options.hosts else []
    variables = _variables(options.variables)
    if hosts:  # ranks that are to be encrypted here must be so on other machines
        files = {name: os.environ[name] for name in os.environ if name.startswith(_TLS)}
        variables = files | variables
    number = 0
    with told_to_end() as told:
        while True:
            shared = {**variables, "TF_DYNEMB_RESTART": str(number)}
            shared |= _meeting(options.ranks, hosts[0][0] if hosts else None, options.port)
            if hosts:
                starts = [_on_host(options, command, host, shared) for host in hosts]
                processes = Processes(starts, options.grace + _MORE, told)
            else:
                starts = starts_of_host(command, 0, options.ranks, shared)
                processes = Processes(starts, options.grace, told)
            failure = processes.wait()
            if failure is None:
                return 128 + told[0] if told else 0
            failure.show()
            number += 1
            if told or number > options.restart:
                return failure.exit_code
            said = f"starting all ranks again: {number} of {options.restart}\n"
            write(sys.stderr, said.encode())


def _meeting(ranks: int, host: str | None, port: int) -> dict[str, str]:
    """Returns the variables by which the ranks meet. No two starts have the same secret."""
    here = host is None or _is_here(host)
    return {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": host or "127.0.0.1",
        "MASTER_PORT": str(port or (_free_port() if here else _PORT)),
        "TF_DYNEMB_RANKS_SECRET": secrets.token_hex(16),
    }


def _on_host(
    options: argparse.Namespace,
    command: Sequence[str],
    host: tuple[str, int, int],
    shared: dict[str, str],
) -> Start:
    """Returns the process that starts the ranks of a machine."""
    name, first, num = host
    told = {
        "command": command,
        "first": first,
        "num": num,
        "environment": shared,
        "grace": options.grace,
    }
    program = [sys.executable, "-c", f"from {starts_of_host.__module__} import main; main()"]
    if not _is_here(name):
        line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(program)}"
        program = [*shlex.split(options.ssh), name, line]
    return Start(f"host {name}", program, os.environ, text=json.dumps(told) + "\n")


def _hosts(text: str, ranks: int) -> list[tuple[str, int, int]]:
    """Returns for each machine its name, its first rank and the number of its ranks.

    Raises:
        ValueError: the text is no list of machines, or they have fewer ranks.
    """
    names: list[str] = []
    numbers: list[int | None] = []
    for entry in text.split(","):
        name, colon, number = entry.strip().rpartition(":")
        if not colon or entry.endswith("]"):  # an address of IPv6 has brackets
            name, number = entry.strip(), ""
        if not name or name.startswith("-") or (colon and number and not number.isdecimal()):
            raise ValueError(f"--hosts must be 'HOST[:RANKS],...', got {text!r}.")
        names.append(name.removeprefix("[").removesuffix("]"))
        numbers.append(int(number) if number else None)
    if len(set(names)) != len(names):
        raise ValueError(f"--hosts names a machine twice: {text!r}.")
    if any(number is None for number in numbers):
        if any(number is not None for number in numbers):
            raise ValueError(
                f"--hosts must say the ranks of all machines or of none, got {text!r}."
            )
        few, more = divmod(ranks, len(names))
        numbers = [few + (i < more) for i in range(len(names))]
    hosts, first = [], 0
    for name, most in zip(names, numbers, strict=True):
        num = min(most or 0, ranks - first)
        if num > 0:
            hosts.append((name, first, num))
        first += num
    if first < ranks:
        raise ValueError(f"--hosts {text!r} has {first} ranks, fewer than -np {ranks}.")
    loopback = [name for name, _, _ in hosts if _is_loopback(name)]
    if loopback and len(loopback) < len(hosts):
        raise ValueError(
            f"--hosts {text!r}: other machines cannot reach {loopback[0]!r}; give it the "
            "name that they have for it."
        )
    return hosts


def _variables(texts: Sequence[str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        if not name or (not is_given and name not in os.environ):
            raise ValueError(f"-x must be 'NAME=VALUE' or a variable that is set, got {text!r}.")
        variables[name] = value if is_given else os.environ[name]
    return variables


def _is_loopback(name: str) -> bool:
    return name in ("localhost", "::1") or name.startswith("127.")


def _is_here(name: str) -> bool:
    """Whether a name is one of this machine, whose ranks need no ssh."""
    return name in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

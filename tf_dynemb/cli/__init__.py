"""The commands on dumps: `python -m tf_dynemb inspect | verify | diff | merge | ...`.

May import: `_presence`, `_version`, `chains`, `serving`, `storage`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from tf_dynemb._version import __version__
from tf_dynemb.cli import diff, export, inspect, merge, prune, rollback, verify
from tf_dynemb.storage import DataLossError

_EPILOG = """exit codes: 0: success, no problems or differences found; 1: damage, or a difference;
2: the command failed. A PATH is the directory of a chain of snapshots, or of one snapshot."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the command line; None: the command line of the process.

    Returns:
        The exit code. For invalid arguments, argparse exits with 2.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        code = command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe. Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except DataLossError as error:
        return _fail(error, 2 if command is diff.run else 1)
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        return _fail(error, 2)
    return code


def _fail(error: Exception, code: int) -> int:
    message = error.args[0] if isinstance(error, KeyError) else error
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tf_dynemb",
        description="Commands on dumps of dynamic embedding tables.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (inspect, verify, diff, merge, rollback, prune, export):
        summary = (module.run.__doc__ or "").splitlines()[0]
        command = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=summary,
            description=summary,
            epilog=_EPILOG,
        )
        module.add_arguments(command)
        command.set_defaults(command=module.run)
    return parser

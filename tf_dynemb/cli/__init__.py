"""The command `tf-dynemb`, or `python -m tf_dynemb`: work on dumps and SavedModels; `run`.

May import: `_presence`, `_version`, `chains`, `format`, `launcher`, `serving`, `storage`.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tf_dynemb._version import __version__
from tf_dynemb.cli import (
    audit,
    diff,
    export,
    forget,
    inspect,
    lookup,
    merge,
    prune,
    publish,
    rollback,
    run,
    verify,
)
from tf_dynemb.storage import DataLossError

_EPILOG = """exit codes: 0: success, nothing found; 1: damage, a difference, or a copy of a key;
2: the command failed; 141: the reader of its output closed the pipe, so that there is no result.
A PATH is the directory of a chain of snapshots, of one snapshot, or of a SavedModel with tables."""

# The exit status that a shell reports for a program ended by the signal SIGPIPE: 128 + 13.
_CLOSED_PIPE = 141


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
        if sys.stdout is not None:  # None: the process was started with stdout closed
            sys.stdout.flush()
    except BrokenPipeError:
        # Not 0 or 1, which say what `diff` and `verify` have found.
        _discard(sys.stdout)
        return _CLOSED_PIPE
    except DataLossError as error:
        return _fail(error, 2 if command is diff.run else 1)
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        return _fail(error, 2)
    except Exception:
        # Python would exit with 1.
        _say(traceback.format_exc())
        return 2
    return code


def _fail(error: Exception, code: int) -> int:
    message = error.args[0] if isinstance(error, KeyError) else error
    _say(f"error: {' '.join(str(message).split())}\n")
    return code


def _say(text: str) -> None:
    """Writes to stderr, if it has a reader. If stdout fails, the rest of its output is dropped."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)
    try:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Lets a stream lose what it has: Python flushes it once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Positional(str):
    """An argument after "--": it is not an option, whatever it begins with."""

    __slots__ = ()


class _CommandParser(argparse.ArgumentParser):
    """A parser of a command, whose options can be anywhere between its positional arguments.

    argparse gives optional positional arguments nothing if they come after an option.
    """

    _is_inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # What comes after the name of another command belongs to that.
        if self._is_inside or any(a.nargs == argparse.REMAINDER for a in self._actions):
            return super().parse_known_args(args, namespace)
        if "--" in args:  # argparse forgets it between the two passes of the intermixed form
            at = args.index("--")
            args = [*args[:at], *map(_Positional, args[at + 1 :])]
        self._is_inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False

    def _parse_optional(self, arg_string: str) -> Any:
        return None if isinstance(arg_string, _Positional) else super()._parse_optional(arg_string)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tf_dynemb",
        description="Commands on dumps of dynamic embedding tables, and a launcher of ranks.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for module in (
        inspect,
        lookup,
        verify,
        diff,
        merge,
        rollback,
        prune,
        publish,
        export,
        forget,
        audit,
        run,
    ):
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

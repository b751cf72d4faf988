"""Runs the benchmarks, each in a separate process, and prints one table of all results."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Result, describe_machine, read_json, table_lines, write_json
from benchmarks.report import page

# Module, arguments at full size, and arguments for a quick run.
FULL: dict[str, list[list[str]]] = {
    "tables": [["--dim", "16"], ["--dim", "64"]],
    "memory": [[]],
    "sparse": [
        ["--optimizer", "none"],
        ["--optimizer", "adagrad"],
        ["--optimizer", "adam"],
    ],
    "phases": [["--optimizer", "adagrad"], ["--optimizer", "adagrad", "--zipf"]],
    "scaling": [[]],
    "growth": [[]],
    "dumps": [[]],
    "startup": [[]],
    "quality": [[]],
}
QUICK: dict[str, list[str]] = {
    "tables": ["--rows", "1000000", "--insert-repeats", "2", "--repeats", "3", "--calls", "8"],
    "memory": ["--rows", "1000000", "--dims", "16"],
    "sparse": ["--rows", "50000", "--samples", "2048", "--repeats", "3", "--steps", "10"],
    "phases": ["--rows", "50000", "--samples", "2048", "--repeats", "2"],
    "scaling": [
        *("--rows", "100000", "1000000", "--dims", "4", "16", "64", "--batches", "64", "65536"),
        *("--hotness", "1", "10", "--tables", "1", "100", "--repeats", "2", "--keys", "500000"),
    ],
    "growth": ["--rows", "4000000"],
    "dumps": ["--rows", "1000000", "--delta-rows", "1000000", "4000000", "--repeats", "3"],
    "startup": ["--repeats", "3"],
    "quality": ["--repeats", "1"],
}


def main() -> int:
    """Prints all results; returns 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=FULL, default=list(FULL), help="benchmarks to run"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: minutes instead of an hour"
    )
    parser.add_argument("--rows", type=int, help="rows per table, for all benchmarks with tables")
    parser.add_argument("--contenders", nargs="+", help="contenders, for benchmarks with a choice")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--report", type=Path, help="also write a page with plots to this file")
    options = parser.parse_args()

    results: list[Result] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            for number, arguments in enumerate(FULL[name]):
                path = Path(folder) / f"{name}_{number}.json"
                command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
                command += QUICK[name] if options.quick else []
                if options.rows and name not in ("scaling", "startup", "quality"):
                    command += ["--rows", str(options.rows)]
                if options.contenders and name in ("tables", "memory", "sparse"):
                    command += ["--contenders", *options.contenders]
                print("$ " + " ".join(command[1:]), flush=True)
                if subprocess.run([*command, "--json", str(path)], check=False).returncode:
                    failed.append(" ".join([name, *arguments]))
                if path.exists():
                    results += read_json(path)

    print("\n" + describe_machine())
    print("\n".join(table_lines(results)))
    if options.json:
        write_json(options.json, results)
    if options.report:
        options.report.write_text(page(results, describe_machine()))
        print(options.report)
    if failed:
        print("failed: " + "; ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

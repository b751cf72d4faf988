"""Start-up: how long `import tf_dynemb` takes beyond importing TensorFlow and Keras."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from benchmarks.harness import OURS, Result, finish, interleave, parser_for

IMPORTS = "import tensorflow, keras"


def import_seconds(statement: str) -> float:
    """Seconds of the imports in a new interpreter."""
    program = f"import time; t = time.perf_counter(); {IMPORTS}{statement}; "
    program += "print(time.perf_counter() - t)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout)


def main() -> None:
    """Prints the difference, repeat by repeat."""
    options = parser_for(__doc__).parse_args()
    times = interleave(
        {
            "with": partial(import_seconds, ", tf_dynemb"),
            "without": partial(import_seconds, ""),
        },
        options.repeats,
    )
    beyond = [a - b for a, b in zip(times["with"], times["without"], strict=True)]
    finish(
        [Result("import beyond TensorFlow and Keras", "s", {OURS: beyond}, less_is_better=True)],
        options.json,
    )


if __name__ == "__main__":
    main()

"""Start-up: the time of `import tf_dynemb` after TensorFlow and Keras are imported."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.harness import OURS, Result, finish, parser_for

PROGRAM = """
import time, tensorflow, keras
began = time.perf_counter()
import tf_dynemb
print(time.perf_counter() - began)
"""


def import_seconds() -> float:
    """Returns the seconds of the import in a new interpreter."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def main() -> None:
    """Measures several interpreters, except the first, which fills the disk cache."""
    options = parser_for(__doc__).parse_args()
    seconds = [import_seconds() for _ in range(options.repeats + 1)][1:]
    result = Result("import, after TensorFlow's", "s", {OURS: seconds}, less_is_better=True)
    finish([result], options.json)


if __name__ == "__main__":
    main()

"""A process with a table in files: prints its statistics, and what it reads for each input line."""

import json
import sys

import numpy as np
from file_pairs import DIM, in_files


def main(folder):
    table = in_files(folder, DIM)
    for first in range(0, 2000, 80):
        table.lookup(range(first, first + 80))
    vectors = table.lookup(range(80)).numpy()
    print(json.dumps(table.stats()), flush=True)
    for _ in sys.stdin:
        table.lookup(range(400, 480))
        same = np.array_equal(table.lookup(range(80)), vectors)
        print(json.dumps({"same": same}), flush=True)


main(sys.argv[1])

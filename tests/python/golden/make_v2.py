"""Writes the golden files of format version 2: `python tests/python/golden/make_v2.py DIRECTORY`.

They hold the same rows as version 1. They were written once and are never written again.
"""

import pathlib
import sys

import make_v1

if __name__ == "__main__":
    make_v1.main(pathlib.Path(sys.argv[1]))

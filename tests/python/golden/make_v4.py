"""Wrote golden/v4: a copy of golden/v2 for each format of vectors.

The script was run once, and is never run again.
"""

import pathlib

import tf_dynemb as de

path = pathlib.Path(__file__).parent
for rows in ("float16", "int8", "int4"):
    de.publish(path / "v4" / rows, from_=path / "v2" / "chain", rows=rows, where={"key_below": 9})

"""The checksums of the files of a SavedModel, apart from its tables.

TensorFlow does not notice if a byte of `saved_model.pb` changes, and may then answer with other
numbers. `export_saved_model` therefore writes the sizes and the checksums of all files that are not
rows into a separate file, and the operator that opens a table compares them
(cc/serving/model_files.h defines the file). A model that is saved otherwise has no such file, and
loads without the comparison.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tf_dynemb._presence import is_file
from tf_dynemb.format.crc32c import crc32c
from tf_dynemb.format.manifest import checksum_of
from tf_dynemb.variables.served import EXTRA

FILE = pathlib.PurePath(EXTRA, "tf_dynemb.checksums.json")

# The bytes that are read at a time.
_CHUNK = 1 << 24


def write(folder: pathlib.Path) -> None:
    """Writes the checksums of a SavedModel that is complete."""
    files = [
        {"file": name.as_posix(), **_of(folder / name)}
        for name in sorted(file.relative_to(folder) for file in folder.rglob("*"))
        if is_file(folder / name) and name.parts[0] != EXTRA
    ]
    members: dict[str, Any] = {"format": "tf_dynemb.model_files", "version": 1, "files": files}
    members["crc32c"] = f"{checksum_of(members):08x}"
    path = folder / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(members, indent=1) + "\n", encoding="utf-8")


def remove(folder: pathlib.Path) -> None:
    """Removes the checksums of a SavedModel that is about to change."""
    (folder / FILE).unlink(missing_ok=True)


def _of(file: pathlib.Path) -> dict[str, Any]:
    crc = size = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            crc = crc32c(chunk, crc)
            size += len(chunk)
    return {"bytes": size, "crc32c": f"{crc:08x}"}

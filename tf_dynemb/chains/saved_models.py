"""Where the tables of SavedModels are."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import pathlib

from tf_dynemb._presence import exists, is_directory, is_url

_MODEL = "saved_model.pb"
_DESCRIPTORS = "tf_dynemb*.json"
_FORMAT = "tf_dynemb.served_tables"


@dataclasses.dataclass(frozen=True)
class ServedTables:
    """Tables of a SavedModel.

    Attributes:
        path: the path of their chain.
        is_inside: whether it is in the SavedModel, so that the model has its own copy or links.
        follow: the path that the loaded model polls; None: none.
    """

    path: pathlib.Path
    is_inside: bool
    follow: str | None


def is_model(path: str | os.PathLike[str]) -> bool:
    """Whether there is a SavedModel at a path; at a URL, there is none."""
    return not is_url(path) and exists(pathlib.Path(path) / _MODEL)


def served_tables(model: pathlib.Path) -> list[ServedTables]:
    """Returns the tables of a SavedModel.

    Raises:
        ValueError: a file that says where tables are is not one.
    """
    found = []
    assets = model / "assets"
    names = sorted(os.listdir(assets)) if is_directory(assets) else []
    for name in fnmatch.filter(names, _DESCRIPTORS):
        file = assets / name
        try:
            members = json.loads(file.read_text(encoding="utf-8"))
            if members["format"] != _FORMAT:
                continue
            path = pathlib.Path(os.path.normpath(assets / members["tables"]))
            follow = members.get("follow")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} does not say where the tables of the model are.") from error
        is_inside = not os.path.isabs(members["tables"])
        found.append(ServedTables(path, is_inside, follow))
    return found

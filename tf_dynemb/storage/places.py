"""The place that a path or a URL means."""

from __future__ import annotations

import os
from typing import TypeAlias

from tf_dynemb._presence import is_url, local_path
from tf_dynemb.storage.local_place import LocalPlace
from tf_dynemb.storage.place import Place
from tf_dynemb.storage.stores import Store

AnyPlace: TypeAlias = "str | os.PathLike[str] | Place"


def place_of(path: AnyPlace, argument: str = "path") -> Place:
    """Returns the place of a path or URL.

    Args:
        path: a path, a `file:` URL, or a URL that `fsspec` knows, such as `s3://bucket/served`; or
            a place, which is returned.
        argument: the name of the argument that has the path, for errors.

    Raises:
        ImportError: the package for this kind of URL is not installed; the message names it.
        ValueError: the URL is of no known kind, or has no path.
    """
    if isinstance(path, Place):
        return path
    if is_url(path):
        return Store(str(path))
    return LocalPlace(local_path(path, argument))

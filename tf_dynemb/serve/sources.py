"""Where a served model is read from: a SavedModel, or a directory of numbered versions of one."""

from __future__ import annotations

import os
import pathlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from tf_dynemb._presence import is_url, local_path, remove_tree

_GRAPH = "saved_model.pb"


class Version(NamedTuple):
    """A SavedModel that a source has.

    Attributes:
        name: its number as the source writes it; empty: it has none.
        stamp: differs if another SavedModel has taken its place.
        place: its path or URL.
    """

    name: str
    stamp: Hashable
    place: str


class Source(ABC):
    """Where versions of a model appear."""

    @abstractmethod
    def versions(self) -> list[Version]:
        """Returns the versions that are there, the newest first.

        Raises:
            OSError: the file system or the store did not answer.
        """

    @abstractmethod
    def fetch(self, version: Version) -> pathlib.Path:
        """Returns a local path of a version, until `release`."""

    @abstractmethod
    def release(self, path: pathlib.Path) -> None:
        """Ends the use of a path that `fetch` has returned."""


def source_of(place: str, cache: pathlib.Path) -> Source:
    """Returns the source at a path or URL.

    Args:
        place: the path or URL.
        cache: a directory for copies of what is at a URL.
    """
    return StoreSource(place, cache) if is_url(place) else PathSource(local_path(place, "--model"))


class PathSource(Source):
    """Versions in a local directory. They must appear as a whole, as exported ones do."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def versions(self) -> list[Version]:
        """Lists them."""
        found = [*self._version("", self._path)]
        if not found:
            try:
                names = [each.name for each in os.scandir(self._path)]
            except (FileNotFoundError, NotADirectoryError):
                names = []
            for name in _numbers(names):
                found += self._version(name, self._path / name)
        return found

    def fetch(self, version: Version) -> pathlib.Path:
        """Returns its path."""
        return pathlib.Path(version.place)

    def release(self, path: pathlib.Path) -> None:
        """Does nothing: it is no copy."""

    def _version(self, name: str, path: pathlib.Path) -> list[Version]:
        try:
            graph = os.stat(path / _GRAPH)
        except OSError:  # one entry that cannot be read does not hide the others
            return []
        return [Version(name, (graph.st_dev, graph.st_ino, graph.st_mtime_ns), str(path))]


class StoreSource(Source):
    """Versions at a URL that fsspec knows, which are copied before they are loaded.

    Stores have no directories that appear as a whole. A copy during which the objects have changed
    is an error, and so are objects that the checksums of an exported model do not know.
    """

    def __init__(self, url: str, cache: pathlib.Path) -> None:
        import fsspec

        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._cache = cache

    def versions(self) -> list[Version]:
        """Lists them."""
        self._fs.invalidate_cache()
        found = [*self._version("", self._root)]
        if not found:
            try:
                listed = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                listed = []
            names = [each.rstrip("/").rpartition("/")[2] for each in listed]
            for name in _numbers(names):
                found += self._version(name, f"{self._root.rstrip('/')}/{name}")
        return found

    def fetch(self, version: Version) -> pathlib.Path:
        """Copies it."""
        self._cache.mkdir(parents=True, exist_ok=True)
        path = self._cache / f"{version.name or 'model'}-{os.urandom(6).hex()}"
        try:
            self._fs.get(f"{version.place}/", f"{path}/", recursive=True)
            self._fs.invalidate_cache()
            if self._version(version.name, version.place) != [version]:
                raise OSError(f"{version.place} has changed while it was copied.")
        except BaseException:
            remove_tree(path)
            raise
        return path

    def release(self, path: pathlib.Path) -> None:
        """Removes the copy."""
        remove_tree(path)

    def _version(self, name: str, root: str) -> list[Version]:
        try:
            objects: dict[str, dict[str, Any]] = self._fs.find(root, detail=True)
        except FileNotFoundError:
            return []
        if f"{root.rstrip('/')}/{_GRAPH}" not in objects:
            return []
        keys = ("ETag", "etag", "mtime", "created", "size")
        stamp = tuple((each, *(str(has.get(k)) for k in keys)) for each, has in objects.items())
        return [Version(name, stamp, root)]


def _numbers(names: Iterable[str]) -> list[str]:
    """Returns the names that are numbers, the highest first."""
    numbers = [name for name in names if name.isascii() and name.isdecimal()]
    plain = {name: name.lstrip("0") for name in numbers}
    return sorted(numbers, key=lambda name: (len(plain[name]), plain[name], name), reverse=True)

"""Chains in object stores and other file systems that `fsspec` reaches, such as `s3://bucket/served`.

    URL/00000007-delta-9a1d…/…     the files of a snapshot, as in docs/file_format.md
    URL/00000007                   publishes it: has the name of its directory

A store has no rename. What publishes a snapshot there is the creation of the object NUMBER, after
all files of the snapshot are there. Of two writers of one number, the store lets one create it, and
the other is told. Readers take only snapshots that are published, so they never see half of one. A
directory whose number was published under another name, or a later number was, is what a writer has
left that failed; the next writer removes it.

Retries of requests, credentials and endpoints are the library's: its configuration files and
environment variables, such as AWS_ENDPOINT_URL, and FSSPEC_S3_… for everything else.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tf_dynemb.storage import DataLossError
from tf_dynemb.storage.chain import MANIFEST, Name
from tf_dynemb.storage.manifest import Manifest

T = TypeVar("T")

# Files that are transferred at a time. The library transfers parts of a large one at a time, too.
_FILES = 8
# The extras of the package that install what fsspec needs for a protocol.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


class Store:
    """The snapshots at a URL.

    Args:
        url: the URL of a chain.

    Raises:
        ImportError: the package for this kind of URL is not installed; the message names it.
        ValueError: there is no such kind of URL.

    All methods raise OSError for errors of the store, such as wrong credentials, and
    FileNotFoundError if files were removed meanwhile.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme = url.partition(":")[0].lower()
        extra = _EXTRAS.get(scheme)
        hint = f"pip install tf_dynemb[{extra}]" if extra else "pip install fsspec"
        try:
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ImportError(f"{url} needs another package: {hint} ({error}).") from error
        self._root = self._root.rstrip("/")

    def names(self) -> list[Name]:
        """Returns the snapshots that are published, in order; none if there is nothing."""
        published, directories = self._list()
        found = []
        for number, place in published.items():
            here = [name for name in directories if name.number == number]
            if len(here) > 1:  # a writer has lost
                text = self._fs.cat_file(place).decode(errors="replace")
                here = [name for name in here if str(name) == text]
            found += here
        return sorted(found)

    def manifest(self, name: Name) -> Manifest:
        """Returns the manifest of a snapshot; raises DataLossError or ValueError as `Snapshot`."""
        place = self._place(name, MANIFEST)
        try:
            text = self._fs.cat_file(place).decode()
        except UnicodeDecodeError as error:
            raise DataLossError(f"{self.url}/{name}/{MANIFEST} is damaged.") from error
        return Manifest.from_json(text, f"{self.url}/{name}/{MANIFEST}")

    def get(self, name: Name, directory: pathlib.Path) -> None:
        """Copies a snapshot to an empty directory, and syncs its files; it is not verified.

        The manifest is the last file.
        """
        manifest = self.manifest(name)
        files = [file.file for file, _ in manifest.files_of_ranks]

        def get(file: str) -> None:
            self._fs.get_file(self._place(name, file), str(directory / file))
            _sync(directory / file)

        _each(get, files)
        get(MANIFEST)

    def put(self, name: Name, directory: pathlib.Path, manifest: Manifest) -> None:
        """Publishes a snapshot with files of a local one.

        Args:
            name: its name, with a number that is not published yet.
            directory: the local directory, whose files were verified.
            manifest: the manifest, which names the files that are copied.

        Raises:
            RuntimeError: another process has published a snapshot with this number.
        """
        self._remove_lost(name)
        files = [file.file for file, _ in manifest.files_of_ranks]
        _each(lambda file: self._fs.put_file(str(directory / file), self._place(name, file)), files)
        self._fs.pipe_file(self._place(name, MANIFEST), manifest.to_json().encode())
        place = f"{self._root}/{name.number:08d}"
        try:
            self._fs.pipe_file(place, str(name).encode(), mode="create")
        except FileExistsError:
            there = self._fs.cat_file(place).decode(errors="replace")
            if there == str(name):  # the answer to the first attempt was lost
                return
            raise RuntimeError(
                f"another process has published {there} at {self.url} meanwhile."
            ) from None

    def remove(self, names: Iterable[Name]) -> None:
        """Removes snapshots; each is first made one that is not published."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name.number:08d}")
            self._remove_directory(name)

    def _remove_directory(self, name: Name) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._place(name), recursive=True)

    def _remove_lost(self, name: Name) -> None:
        """Removes directories that can never be published, because a later number is."""
        published = set(self.names())
        _, directories = self._list()
        for other in directories:
            if other not in published and other.number < name.number:
                self._remove_directory(other)

    def _list(self) -> tuple[dict[int, str], list[Name]]:
        """Returns the objects NUMBER by their numbers, and the directories of snapshots."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}, []
        published: dict[int, str] = {}
        directories = []
        for place in found:
            text = place.rstrip("/").rpartition("/")[2]
            name = Name.parse(text)
            if name is not None:
                directories.append(name)
            elif len(text) >= 8 and text.isascii() and text.isdecimal():
                published[int(text)] = place
        return published, directories

    def _place(self, *parts: object) -> str:
        return "/".join([self._root, *map(str, parts)])


def _each(transfer: Callable[[str], Any], files: Sequence[str]) -> None:
    """Transfers files, several at a time; raises the first error after all have ended."""
    with concurrent.futures.ThreadPoolExecutor(_FILES) as pool:
        pending = [pool.submit(transfer, file) for file in files]
        try:
            for each in concurrent.futures.as_completed(pending):
                each.result()
        except BaseException:
            for each in pending:
                each.cancel()
            raise


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

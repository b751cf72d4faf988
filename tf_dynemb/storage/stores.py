"""Chains in object stores that `fsspec` reaches, such as `s3://bucket/served`.

    URL/00000007-delta-9a1d….5c40…/…   the files of a snapshot, as in docs/file_format.md
    URL/00000007                       publishes it: has the name of its directory

A store has no rename. What publishes a snapshot there is the creation of the object NUMBER, after
all files of the snapshot are there. Of two writers of one number, the store lets one create it, and
the other is told. Readers take only snapshots that are published, so they never see half of one.

Each attempt to write a snapshot makes a new directory, NUMBER-KIND-ID.TOKEN, so that no file of a
published snapshot is ever written again, and no other program's files are: nothing else makes such
names. A directory whose number, or a later one, was published by others is what a writer has
left that failed. A later writer removes it.

Readers read the ranges of the files that they need. Writers send columns whose number of rows is
known while they are written, and other files, such as those of keys and their index, from a
temporary folder.

Retries of requests, credentials and endpoints are the library's: its configuration files and
environment variables, such as AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tf_dynemb.format import crc32c
from tf_dynemb.format.errors import DataLossError
from tf_dynemb.format.manifest import Manifest
from tf_dynemb.storage.part import Part
from tf_dynemb.storage.place import Place
from tf_dynemb.storage.snapshot import (
    MANIFEST,
    Name,
    Snapshot,
    manifest_of,
    next_number,
    since_last_base,
)
from tf_dynemb.storage.store_folder import StoreFolder
from tf_dynemb.storage.stored_part import StoredPart
from tf_dynemb.storage.stored_snapshot import StoredSnapshot

# Manifests that are read at a time.
_MANIFESTS = 16
# The extras of the package that install what fsspec needs for a protocol.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_DIRECTORY = re.compile(r"(.+)\.[0-9a-f]{16}")
_NUMBER = re.compile("[0-9]{8}|[1-9][0-9]{8,}")


class Stored(NamedTuple):
    """A directory of a snapshot in a store: its name, and that of the snapshot."""

    directory: str
    name: Name


class Store(Place):
    """The snapshots at a URL; a `Place`. Threads can share one, and a forked process has it, too.

    Args:
        url: the URL of a chain.

    Attributes:
        url: the URL.

    Raises:
        ImportError: the package for this kind of URL is not installed; the message names it.
        ValueError: it is not a URL, or of no known kind, or has no path.

    All methods raise OSError for errors of the store, such as wrong credentials, and
    FileNotFoundError if files were removed meanwhile. The messages have the URL.
    """

    is_snapshot = False

    def __init__(self, url: str) -> None:
        scheme, separator, rest = url.partition("://")
        if not separator or not rest.strip("/"):
            raise ValueError(f"{url!r} must be a URL with a path, such as s3://bucket/served.")
        if "::" in url.partition("//")[0]:  # a layer over a store does not create exclusively
            raise ValueError(f"{url!r} must be the URL of the store itself.")
        self.url = f"{scheme.lower()}://{rest.rstrip('/')}"
        self._known: dict[str, Stored] = {}  # by the name of the snapshot
        # Of the last listing: the numbers that were published, and all directories by number.
        self._listed: tuple[set[int], dict[int, list[Stored]]] = (set(), {})
        self._tried = ""  # the folder that was to be published last
        extra = _EXTRAS.get(scheme.lower())
        try:
            self._folder = StoreFolder(self.url)
        except ImportError as error:
            hint = f"pip install tf_dynemb[{extra}] ({error})" if extra else str(error)
            raise ImportError(f"{url} needs another package: {hint}.") from error

    def __str__(self) -> str:
        return self.url

    def absent(self) -> FileNotFoundError:
        """Returns the error for a place without snapshots."""
        return FileNotFoundError(f"{self.url} holds no snapshot, or does not exist.")

    def names(self, begin: str = "") -> list[Name]:
        """Returns the names of all snapshots; see `snapshots` for errors."""
        return [each.name for each in self.snapshots()]

    def open(self, names: Sequence[str]) -> list[Snapshot]:
        """Opens snapshots; raises as `manifest`."""
        if not self._known.keys() >= set(names):
            self.snapshots()
        lost = [name for name in names if name not in self._known]
        if lost:
            raise FileNotFoundError(f"{self.url}/{lost[0]} is not there any more.")
        stored = [self._known[name] for name in names]
        with concurrent.futures.ThreadPoolExecutor(_MANIFESTS) as pool:
            manifests = list(pool.map(self.manifest, stored))
        return [
            StoredSnapshot(self.folder(each.directory), manifest)
            for each, manifest in zip(stored, manifests, strict=True)
        ]

    def folder(self, directory: str) -> StoreFolder:
        """Returns the folder of a snapshot."""
        return StoreFolder(f"{self.url}/{directory}")

    def snapshots(self) -> list[Stored]:
        """Returns the snapshots that are published, in order; none if there is nothing.

        Raises:
            DataLossError: one is missing, from the last base on.
        """
        published, directories = self._list()
        found = []
        for number in published:
            here = directories.get(number, [])
            if len(here) > 1:  # other writers have failed
                text = self._text_of(number)
                here = [each for each in here if each.directory == text]
            found += here
        found.sort(key=lambda each: each.name)
        chain = since_last_base([each.name for each in found])
        starts = chain and (chain[0].kind == "base" or chain[0].number == 1)
        if published and not starts:
            raise DataLossError(f"{self.url} is damaged: it lacks the base of its deltas.")
        there = {name.number for name in chain}
        for number in range(min(there, default=0), max(published, default=-1) + 1):
            if number not in there:
                raise DataLossError(f"{self.url} is damaged: it lacks its snapshot {number:08d}.")
        self._known = {str(each.name): each for each in found}
        return found

    def manifest(self, stored: Stored) -> Manifest:
        """Returns the manifest of a published snapshot.

        Raises:
            DataLossError: it is damaged, or of another snapshot, or the snapshot is not published.
            ValueError: it is of an unknown version.
        """
        folder = self.folder(stored.directory)
        where = f"{folder.url}/{MANIFEST}"
        try:
            text = folder.read(MANIFEST)
        except FileNotFoundError as error:
            raise DataLossError(f"{where} is missing.") from error
        manifest = manifest_of(text, stored.name, where)
        if self._text_of(stored.name.number) != stored.directory:
            raise DataLossError(f"{folder.url} is not published.")
        return manifest

    def put(self, number: int, directory: pathlib.Path, manifest: Manifest) -> None:
        """Publishes a snapshot with files of a local one.

        Args:
            number: its number, which is not published yet.
            directory: the local directory, whose files were verified.
            manifest: the manifest, which names the files that are copied.

        Raises:
            RuntimeError: another process has published a snapshot with this number, or later ones.
        """
        name = Name(number, manifest.kind, manifest.id)
        folder = _new_folder(name)
        self.folder(folder).put(directory, [file.file for file, _ in manifest.files_of_ranks])
        self.publish(folder, name, manifest)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nothing: a store has no locks. Of two writers of a snapshot, one is told."""
        yield

    @contextlib.contextmanager
    def writing(self, kind: str, id_: str) -> Iterator[str]:
        """A context in which a snapshot is written; yields the name of its folder."""
        number = next_number(self.names())
        try:
            self.remove_lost(number)
        except OSError as error:
            warnings.warn(f"files of other writers cannot be removed: {error}", stacklevel=4)
        name = Name(number, kind, id_)
        folder = _new_folder(name)
        try:
            yield folder
        finally:
            # The object that publishes the folder can appear even after an error or an interrupt.
            if self._tried != folder:
                with contextlib.suppress(OSError):  # a later writer removes it
                    self.folder(folder).remove()

    def part(self, folder: str, rank: int, checksum: crc32c.Checksum, block_bytes: int) -> Part:
        """Returns the part of a process in the snapshot that is being written."""
        return StoredPart(self.folder(folder), rank, checksum, block_bytes)

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the sizes of the files of the snapshot that is being written, by name."""
        name = Name.parse(folder.partition(".")[0])
        last = max((each.name.number for each in self._known.values()), default=0)
        if name is not None and name.number <= last:  # others may have removed the files
            raise self._was_later(last)
        return self.folder(folder).sizes()

    def publish(self, folder: str, name: Name, manifest: Manifest) -> Snapshot:
        """Makes the snapshot visible; see `Place`."""
        files = self.folder(folder)
        files.write(MANIFEST, manifest.to_json().encode())
        # Otherwise others have published its number.
        created = folder.startswith(f"{name}.") and self._create(name.number, folder)
        later = name.number
        with contextlib.suppress(OSError):  # a snapshot that was published is not a failure
            later = max(self._list()[0], default=0)
        if not created or later != name.number:
            # If it was created, others have published and removed this number.
            self._remove([Stored(folder, name)])
            raise self._was_later(max(later, name.number))
        return StoredSnapshot(files, manifest)

    def _was_later(self, number: int) -> RuntimeError:
        """Returns the error for a writer if others have published a snapshot meanwhile."""
        return RuntimeError(
            f"another process has published snapshot {number:08d} at {self.url} meanwhile."
        )

    def _create(self, number: int, folder: str) -> bool:
        """Creates the object that publishes a folder; returns False if others have created it."""
        self._tried = folder
        try:
            self._folder.write(_marker(number), folder.encode(), new=True)
        except FileExistsError:  # also if the answer to the first attempt was lost
            return self._text_of(number) == folder
        except OSError:
            if self._text_of(number) != folder:  # otherwise only the answer was lost
                raise
        return True

    def remove(self, names: Iterable[Name]) -> None:
        """Removes snapshots that are published. Warns if it fails, because they take space."""
        try:
            self._remove([self._known[str(name)] for name in names])
        except OSError as error:
            warnings.warn(f"superseded snapshots cannot be removed: {error}", stacklevel=2)

    def _remove(self, snapshots: Iterable[Stored]) -> None:
        """Removes snapshots; each is first made one that is not published."""
        for stored in snapshots:
            if self._text_of(stored.name.number) == stored.directory:
                self._folder.remove_file(_marker(stored.name.number))
            self.folder(stored.directory).remove()

    def remove_lost(self, number: int) -> None:
        """Removes the listed directories of lower numbers, which cannot be published any more."""
        published, directories = self._listed
        for other, here in directories.items():
            if other >= number or (other in published and len(here) == 1):
                continue
            text = self._text_of(other)
            for stored in here:
                if stored.directory != text:
                    self.folder(stored.directory).remove()

    def _text_of(self, number: int) -> str:
        """Returns the name of the directory that is published as a number; "": none is."""
        with contextlib.suppress(FileNotFoundError):
            return self._folder.read(_marker(number)).decode(errors="replace")
        return ""

    def _list(self) -> tuple[set[int], dict[int, list[Stored]]]:
        """Returns the numbers that are published, and the directories of snapshots by number."""
        published: set[int] = set()
        directories: dict[int, list[Stored]] = {}
        for text, is_folder in self._folder.entries():
            match = _DIRECTORY.fullmatch(text)
            name = Name.parse(match[1]) if match else None
            if is_folder and name is not None:
                directories.setdefault(name.number, []).append(Stored(text, name))
            elif not is_folder and _NUMBER.fullmatch(text):
                published.add(int(text))
        self._listed = published, directories
        return self._listed


def _marker(number: int) -> str:
    """Returns the name of the object that publishes a snapshot."""
    return f"{number:08d}"


def _new_folder(name: Name) -> str:
    """Returns the name of a directory that nothing else has written to."""
    return f"{name}.{secrets.token_hex(8)}"

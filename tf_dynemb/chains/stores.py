"""Chains in object stores that `fsspec` reaches, such as `s3://bucket/served`.

    URL/00000007-delta-9a1d….5c40…/…   the files of a snapshot, as in docs/file_format.md
    URL/00000007                       publishes it: has the name of its directory

A store has no rename. What publishes a snapshot there is the creation of the object NUMBER, after
all files of the snapshot are there. Of two writers of one number, the store lets one create it, and
the other is told. Readers take only snapshots that are published, so they never see half of one.

Each attempt to write a snapshot makes a new directory, NUMBER-KIND-ID.TOKEN, so that no file of a
published snapshot is ever written again, and no other program's files are: nothing else makes such
names. A directory whose number, or a later one, was published by others is what a writer has
left that failed. The next writer removes it.

Retries of requests, credentials and endpoints are the library's: its configuration files and
environment variables, such as AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tf_dynemb.format.manifest import Manifest
from tf_dynemb.storage import DataLossError
from tf_dynemb.storage.chain import MANIFEST, Name, since_last_base

# Files that are transferred at a time. The library transfers parts of a large one at a time, too.
_FILES = 8
# The extras of the package that install what fsspec needs for a protocol.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_DIRECTORY = re.compile(r"(.+)\.[0-9a-f]{16}")
_NUMBER = re.compile("[0-9]{8}|[1-9][0-9]{8,}")


class Stored(NamedTuple):
    """A directory of a snapshot in a store: its name, and that of the snapshot."""

    directory: str
    name: Name


class Store:
    """The snapshots at a URL.

    Args:
        url: the URL of a chain.

    Raises:
        ImportError: the package for this kind of URL is not installed; the message names it.
        ValueError: it is not a URL, or of no known kind, or has no path.

    All methods raise OSError for errors of the store, such as wrong credentials, and
    FileNotFoundError if files were removed meanwhile. The messages have the URL.
    """

    def __init__(self, url: str) -> None:
        scheme, separator, rest = url.partition("://")
        if not separator or not rest.strip("/"):
            raise ValueError(f"{url!r} must be a URL with a path, such as s3://bucket/served.")
        self.url = f"{scheme.lower()}://{rest.rstrip('/')}"
        extra = _EXTRAS.get(scheme.lower().rpartition("::")[2])
        try:
            import fsspec

            with _naming(self.url):
                self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            hint = f"pip install tf_dynemb[{extra}] ({error})" if extra else str(error)
            raise ImportError(f"{url} needs another package: {hint}.") from error

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
        if published and (not chain or chain[0].kind != "base"):
            raise DataLossError(f"{self.url} is damaged: it lacks the base of its deltas.")
        there = {name.number for name in chain}
        for number in range(min(there, default=0), max(published, default=-1) + 1):
            if number not in there:
                raise DataLossError(f"{self.url} is damaged: it lacks its snapshot {number:08d}.")
        return found

    def manifest(self, stored: Stored) -> Manifest:
        """Returns the manifest of a published snapshot.

        Raises:
            DataLossError: it is damaged, or of another snapshot, or the snapshot is not published.
            ValueError: it is of an unknown version.
        """
        where = f"{self.url}/{stored.directory}/{MANIFEST}"
        with _naming(where):
            data = self._fs.cat_file(self._place(stored.directory, MANIFEST))
        try:
            manifest = Manifest.from_json(data.decode(), where)
        except UnicodeDecodeError as error:
            raise DataLossError(f"{where} is damaged.") from error
        if (manifest.kind, manifest.id) != (stored.name.kind, stored.name.id):
            raise DataLossError(f"{where} is of another snapshot: {manifest.kind}-{manifest.id}.")
        if self._text_of(stored.name.number) != stored.directory:
            raise DataLossError(f"{self.url}/{stored.directory} is not published.")
        return manifest

    def get(self, stored: Stored, manifest: Manifest, directory: pathlib.Path) -> None:
        """Copies a snapshot to an empty directory, and syncs its files; it is not verified.

        The manifest is the last file.
        """

        def get(file: str) -> None:
            with _naming(f"{self.url}/{stored.directory}/{file}"):
                self._fs.get_file(self._place(stored.directory, file), str(directory / file))
            _sync(directory / file)

        _each(get, [file.file for file, _ in manifest.files_of_ranks])
        get(MANIFEST)

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
        stored = Stored(f"{name}.{secrets.token_hex(8)}", name)

        def put(file: str) -> None:
            with _naming(f"{self.url}/{stored.directory}/{file}"):
                self._fs.put_file(str(directory / file), self._place(stored.directory, file))

        _each(put, [file.file for file, _ in manifest.files_of_ranks])
        with _naming(f"{self.url}/{stored.directory}/{MANIFEST}"):
            place = self._place(stored.directory, MANIFEST)
            self._fs.pipe_file(place, manifest.to_json().encode())
        created = True
        with _naming(f"{self.url}/{number:08d}"):
            try:
                self._fs.pipe_file(self._marker(number), stored.directory.encode(), mode="create")
            except FileExistsError:  # also if the answer to the first attempt was lost
                created = self._text_of(number) == stored.directory
        later = max(self._list()[0], default=0)
        if created and later == number:
            return
        self.remove([stored])  # if it was created, others have published and removed this number
        raise RuntimeError(
            f"another process has published snapshot {max(later, number):08d} at {self.url} "
            "meanwhile."
        )

    def remove(self, snapshots: Iterable[Stored]) -> None:
        """Removes snapshots; each is first made one that is not published."""
        for stored in snapshots:
            if self._text_of(stored.name.number) == stored.directory:
                self._remove_file(self._marker(stored.name.number))
            self._remove_directory(stored)

    def _remove_directory(self, stored: Stored) -> None:
        """Removes the objects of a directory, by their exact names: `rm` takes a `*` for others."""
        with _naming(f"{self.url}/{stored.directory}"), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            _each(self._remove_file, self._fs.find(self._place(stored.directory)))

    def _remove_file(self, place: str) -> None:
        with _naming(place), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(place)

    def remove_lost(self, number: int) -> None:
        """Removes directories of lower numbers that can never be published any more."""
        published, directories = self._list()
        for other, here in directories.items():
            if other >= number or (other in published and len(here) == 1):
                continue
            text = self._text_of(other)
            for stored in here:
                if stored.directory != text:
                    self._remove_directory(stored)

    def _text_of(self, number: int) -> str:
        """Returns the name of the directory that is published as a number; "": none is."""
        with _naming(f"{self.url}/{number:08d}"), contextlib.suppress(FileNotFoundError):
            text: bytes = self._fs.cat_file(self._marker(number))
            return text.decode(errors="replace")
        return ""

    def _list(self) -> tuple[set[int], dict[int, list[Stored]]]:
        """Returns the numbers that are published, and the directories of snapshots by number."""
        with _naming(self.url):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return set(), {}
        published: set[int] = set()
        directories: dict[int, list[Stored]] = {}
        for each in found:
            text = each["name"].rstrip("/").rpartition("/")[2]
            match = _DIRECTORY.fullmatch(text)
            name = Name.parse(match[1]) if match else None
            if each["type"] == "directory" and name is not None:
                directories.setdefault(name.number, []).append(Stored(text, name))
            elif each["type"] == "file" and _NUMBER.fullmatch(text):
                published.add(int(text))
        return published, directories

    def _marker(self, number: int) -> str:
        return self._place(f"{number:08d}")

    def _place(self, *parts: str) -> str:
        return "/".join([self._root, *parts])


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Makes errors of the library OSErrors that name a place."""
    try:
        yield
    except (FileExistsError, ImportError):
        raise
    except Exception as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(f"{where}: {str(error) or type(error).__name__}") from error


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

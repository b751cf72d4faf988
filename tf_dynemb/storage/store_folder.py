"""The objects of an object store whose names begin with the URL of a folder."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from tf_dynemb.format.errors import DataLossError
from tf_dynemb.storage.files import in_parallel

# A range is read in pieces of this size, several at a time.
_PIECE = 8 << 20


class StoreFolder:
    """A folder in a store. Threads can share one, and a forked process has it, too.

    Args:
        url: the URL.

    Attributes:
        url: the URL.

    Raises:
        ImportError, ValueError: `fsspec`, or what it needs for the URL, is not there.

    All methods raise OSError for errors of the store, such as wrong credentials, and
    FileNotFoundError if a file was removed meanwhile. The messages have the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._connect()

    def _connect(self) -> tuple[int, Any, str]:
        import fsspec

        try:
            with naming(self.url):
                self._connected = os.getpid(), *fsspec.core.url_to_fs(self.url)
        except OSError as error:
            if isinstance(error.__cause__, (TypeError, ValueError)):  # nothing was asked for yet
                raise ValueError(str(error)) from error
            raise
        return self._connected

    @property
    def fs(self) -> Any:
        """The file system, which a process must not have from its parent."""
        process, fs, _ = self._connected
        return fs if process == os.getpid() else self._connect()[1]

    def place(self, file: str) -> str:
        """Returns the path of a file in the file system."""
        return f"{self._connected[2].rstrip('/')}/{file}"

    def read(self, file: str) -> bytes:
        """Returns the content of a file."""
        try:
            with naming(f"{self.url}/{file}"):
                # s3fs asks for the size of a file of which no range is read.
                data: bytes = self.fs.cat_file(self.place(file), start=0)
        except FileNotFoundError:
            raise
        except OSError:
            if self._size(file) != 0:  # an empty file has no range
                raise
            data = b""
        return data

    def _size(self, file: str) -> int | None:
        """Returns the size of a file; None if the store does not say it."""
        with contextlib.suppress(Exception):
            self.fs.invalidate_cache()
            return int(self.fs.info(self.place(file))["size"])
        return None

    def read_ranges(self, file: str, begins: Sequence[int], ends: Sequence[int]) -> bytearray:
        """Returns ranges of a file, one after the other.

        Raises:
            DataLossError: the file is shorter.
        """
        pieces = [
            (at, min(at + _PIECE, end))
            for begin, end in zip(begins, ends, strict=True)
            for at in range(begin, end, _PIECE)
        ]
        where = f"{self.url}/{file}"
        try:
            with naming(where):
                froms, tos = map(list, zip(*pieces, strict=True)) if pieces else ([], [])
                found = self.fs.cat_ranges([self.place(file)] * len(pieces), froms, tos)
                for each in found:
                    if isinstance(each, BaseException):
                        raise each
        except FileNotFoundError:
            raise
        except OSError as error:
            size = self._size(file)
            if size is None or size >= max(ends, default=0):
                raise
            raise DataLossError(f"{where} ends at byte offset {size}.") from error
        for (begin, end), each in zip(pieces, found, strict=True):
            if len(each) != end - begin:
                raise DataLossError(f"{where} ends at byte offset {begin + len(each)}.")
        return bytearray().join(found)

    def write(self, file: str, content: bytes, new: bool = False) -> None:
        """Writes a file.

        Raises:
            FileExistsError: `new`, and it exists, perhaps because an answer of the store was lost.
        """
        with naming(f"{self.url}/{file}"):
            self.fs.pipe_file(self.place(file), content, **({"mode": "create"} if new else {}))

    def open_new(self, file: str, part_bytes: int) -> Any:
        """Returns a file object for writing, which sends parts of a size as they are written."""
        with naming(f"{self.url}/{file}"):
            return self.fs.open(self.place(file), "wb", block_size=part_bytes)

    def put(self, directory: pathlib.Path, files: Sequence[str]) -> None:
        """Copies files of a local directory here."""

        def put(file: str) -> None:
            with naming(f"{self.url}/{file}"):
                self.fs.put_file(str(directory / file), self.place(file))

        in_parallel(put, files)

    def entries(self) -> list[tuple[str, bool]]:
        """Returns the names of the files and folders in this one, and whether each is a folder."""
        with naming(self.url):
            self.fs.invalidate_cache()
            try:
                found = self.fs.ls(self.place("").rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
        return [
            (each["name"].rstrip("/").rpartition("/")[2], each["type"] == "directory")
            for each in found
        ]

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the files, by name."""
        with naming(self.url):
            self.fs.invalidate_cache()
            found = self.fs.find(self.place("").rstrip("/"), detail=True)
        return {place.rpartition("/")[2]: each["size"] for place, each in found.items()}

    def remove(self) -> None:
        """Removes all files, by their exact names: `rm` takes a `*` for others."""
        with naming(self.url), contextlib.suppress(FileNotFoundError):
            self.fs.invalidate_cache()
            found = self.fs.find(self.place("").rstrip("/"))
            in_parallel(self.remove_file, [place.rpartition("/")[2] for place in found])

    def remove_file(self, file: str) -> None:
        """Removes a file, if it is there."""
        with naming(f"{self.url}/{file}"), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.place(file))


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Makes errors of the library OSErrors that name a place."""
    try:
        yield
    except (FileExistsError, ImportError):
        raise
    except Exception as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(f"{where}: {str(error) or type(error).__name__}") from error

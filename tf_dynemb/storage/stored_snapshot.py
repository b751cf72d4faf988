"""Reading of a snapshot in a store, by the ranges of its files that are asked for."""

from __future__ import annotations

import collections
import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tf_dynemb.format import npy, safetensors
from tf_dynemb.format.errors import DataLossError
from tf_dynemb.format.manifest import DenseFile, Manifest
from tf_dynemb.format.table_entry import ColumnFile
from tf_dynemb.storage.files import in_parallel
from tf_dynemb.storage.snapshot import Snapshot
from tf_dynemb.storage.store_folder import StoreFolder

# Columns that a snapshot keeps open.
_COLUMNS = 8
# The size up to which a file is read as a whole, and kept, as long as those of a snapshot have no
# more bytes than this. Most files of deltas are small.
_SMALL = 256 << 10
_SMALL_IN_ALL = 2 << 20
# Rows one after the other are read this many bytes ahead.
_AHEAD = 16 << 20
# Single rows are read in groups of about this many bytes: a slot of an index and those after it.
_GROUP = 256
# The groups from which on all rows between them are read, unless these are many more.
_MANY = 512
# The bytes between two groups up to which they are read together: a request takes longer.
_GAP = 4 << 10
# The bytes of single rows of a column that are kept.
_KEPT = 16 << 20


class StoredSnapshot(Snapshot):
    """A published snapshot in a store. Its columns are `StoredColumn`s.

    Args:
        folder: the folder of its files.
        manifest: its manifest.
    """

    def __init__(self, folder: StoreFolder, manifest: Manifest) -> None:
        self.manifest = manifest
        self._url = folder.url
        self._files = _Files(folder)
        # Those that were used last, with what they have read ahead.
        self._column = functools.lru_cache(_COLUMNS)(self._files.column)

    @property
    def directory(self) -> pathlib.Path:  # type: ignore[override]
        """Raises ValueError: there is no local directory."""
        raise ValueError(f"{self} is not a local directory: make a local copy with `publish`.")

    def __str__(self) -> str:
        return self._url

    def parts(self, file: ColumnFile) -> Iterator[npt.NDArray[np.uint8]]:
        """As of `Snapshot`."""
        self._check_size(file)
        block_bytes = self.manifest.block_bytes
        step = block_bytes * max(1, _AHEAD // block_bytes)
        for begin in range(0, file.bytes, step):
            end = min(begin + step, file.bytes)
            yield np.frombuffer(self._files.read(file, [begin], [end]), np.uint8)

    def arrays(self, file: DenseFile) -> dict[str, safetensors.Array]:
        """As of `Snapshot`; they are in memory."""
        self._check_size(file)
        data = np.frombuffer(self._files.read(file, [0], [file.bytes]), np.uint8)
        data.flags.writeable = False
        return safetensors.parse(data, f"{self}/{file.file}")

    def size(self, file: ColumnFile) -> int | None:
        """As of `Snapshot`."""
        return self._files.size(file.file)

    def _expect(self, files: Sequence[ColumnFile]) -> None:
        self._files.fetch(files)

    def _map(
        self, file: ColumnFile, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        column = self._column(file, dtype, shape)
        return cast("npt.NDArray[Any]", column) if column.size else np.asarray(column)


class _Files:
    """The files of a snapshot; the content of small ones is kept. Threads can share it."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._small: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}  # {}: not known yet

    def size(self, file: str) -> int | None:
        """Returns the size of a file; None if it is not there."""
        if not self._sizes:
            self._sizes = self._folder.sizes()
        return self._sizes.get(file)

    def read(self, file: ColumnFile, begins: list[int], ends: list[int]) -> bytes | bytearray:
        """Returns ranges of a file, one after the other; a small file is read as a whole, once."""
        if file.bytes > _SMALL:
            return self._folder.read_ranges(file.file, begins, ends)
        content = self._small.get(file.file)
        if content is None:
            content = bytes(self._folder.read_ranges(file.file, [0], [file.bytes]))
            if sum(map(len, list(self._small.values()))) + len(content) <= _SMALL_IN_ALL:
                self._small[file.file] = content
        return b"".join(content[begin:end] for begin, end in zip(begins, ends, strict=True))

    def fetch(self, files: Sequence[ColumnFile]) -> None:
        """Reads small files, several at a time, as far as they are there."""

        def fetch(file: ColumnFile) -> None:
            with contextlib.suppress(FileNotFoundError, DataLossError):
                self.read(file, [], [])

        in_parallel(fetch, [file for file in files if file.bytes <= _SMALL])

    def column(
        self, file: ColumnFile, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> StoredColumn:
        """Opens a column; raises DataLossError if its header is another one."""
        header = npy.header(dtype, shape)
        filename = f"{self._folder.url}/{file.file}"
        try:
            found = self.read(file, [0], [len(header)])
        except FileNotFoundError as error:
            raise DataLossError(f"{filename} is missing.") from error
        if found != header:
            raise DataLossError(
                f"{filename} is damaged at byte offset 0: its header is not the header of {dtype} "
                f"{list(shape)}."
            )
        return StoredColumn(filename, functools.partial(self.read, file), dtype, shape)


class StoredColumn:
    """A column in a store, [rows, ...]: an array that reads the rows that it is indexed with.

    Rows one after the other are read ahead. Of single rows, groups of neighbours are read, and the
    latest groups are kept. Threads can share it.

    Args:
        filename: its URL.
        read: returns ranges of the bytes of its file, one after the other.
        dtype, shape: as of an array.

    Attributes:
        filename, dtype, shape: as above.
        ndim, size: as of an array.
    """

    def __init__(
        self,
        filename: str,
        read: Callable[[list[int], list[int]], bytes | bytearray],
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> None:
        self.filename = filename
        self.dtype = dtype
        self.shape = shape
        self.ndim = len(shape)
        self.size = int(np.prod(shape, dtype=np.int64))
        self._bytes = read
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        self._group = max(1, _GROUP // self._row_bytes) if self.size else 1
        self._window = (0, np.empty((0, *shape[1:]), dtype))  # the first row; rows after each other
        self._groups: collections.OrderedDict[int, npt.NDArray[Any]] = collections.OrderedDict()

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        rows: npt.NDArray[Any] = np.asarray(self._rows(0, len(self)), dtype)
        return rows

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """Returns rows.

        Args:
            index: a slice, or an array of integers or booleans.
        """
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step == 1:
                return self._rows(first, max(first, last))
            return self[np.arange(first, last, step)]
        positions = np.asarray(index)
        if positions.dtype == np.bool_:
            positions = np.flatnonzero(positions)
        if positions.size and (positions.min() < -len(self) or positions.max() >= len(self)):
            raise IndexError(f"{self.filename} has {len(self)} rows.")
        return self._single(positions.ravel() % max(1, len(self))).reshape(
            *positions.shape, *self.shape[1:]
        )

    def _rows(self, first: int, last: int, ahead: int = _AHEAD) -> npt.NDArray[Any]:
        """Returns the rows from `first` up to, but without, `last`; reads some bytes ahead."""
        begin, rows = self._window
        if not begin <= first <= last <= begin + len(rows):
            end = max(last, min(first + ahead // self._row_bytes, len(self)))
            rows = self._read([first], [end])
            begin = first
            if rows.nbytes <= _AHEAD:
                self._window = first, rows
        found: npt.NDArray[Any] = rows[first - begin : last - begin]
        return found

    def _single(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the rows at positions [n]."""
        wanted, where = np.unique(positions // self._group, return_inverse=True)
        if wanted.size > _MANY and wanted.size * 4 > wanted[-1] - wanted[0]:
            first, last = int(positions.min()), int(positions.max()) + 1
            span: npt.NDArray[Any] = self._rows(first, last, 0)[positions - first]
            return span
        groups = np.zeros((wanted.size, self._group, *self.shape[1:]), self.dtype)
        missing = []
        # Each access to `_groups` is atomic. A lock would be a forked child's that another thread
        # of its parent holds.
        for place, number in enumerate(wanted.tolist()):
            rows = self._groups.get(number)
            if rows is None:
                missing.append(place)
                continue
            groups[place, : len(rows)] = rows
            with contextlib.suppress(KeyError):  # another thread has dropped it
                self._groups.move_to_end(number)
        if missing:
            for place, rows in zip(missing, self._read_groups(wanted[missing]), strict=True):
                groups[place, : len(rows)] = rows
                self._groups[int(wanted[place])] = rows.copy()
            with contextlib.suppress(KeyError):
                while len(self._groups) * self._group * self._row_bytes > _KEPT:
                    self._groups.popitem(last=False)
        chosen: npt.NDArray[Any] = groups[where, positions % self._group]
        return chosen

    def _read_groups(self, numbers: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
        """Reads groups of rows, and what is between those that are near each other.

        Args:
            numbers: the numbers of the groups, in ascending order.
        """
        gap = max(1, _GAP // (self._group * self._row_bytes))
        breaks = np.flatnonzero(np.diff(numbers) > gap) + 1
        first_groups = numbers[np.concatenate([[0], breaks])]
        last_groups = numbers[np.concatenate([breaks, [numbers.size]]) - 1]
        firsts = first_groups * self._group
        lasts = np.minimum((last_groups + 1) * self._group, len(self))
        rows = self._read(firsts.tolist(), lasts.tolist())
        ends = np.cumsum(lasts - firsts)
        found = []
        for number, run in zip(
            numbers, np.searchsorted(breaks, np.arange(numbers.size), side="right"), strict=True
        ):
            at = ends[run] - lasts[run] + number * self._group
            found.append(rows[at : min(at + self._group, ends[run])])
        return found

    def _read(self, firsts: list[int], lasts: list[int]) -> npt.NDArray[Any]:
        """Reads ranges of rows."""
        at, size = npy.HEADER_BYTES, self._row_bytes
        data = self._bytes(
            [at + size * first for first in firsts], [at + size * last for last in lasts]
        )
        rows: npt.NDArray[Any] = np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])
        rows.flags.writeable = False
        return rows

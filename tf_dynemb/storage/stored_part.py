"""Writing of the files of a snapshot to a store."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tf_dynemb._presence import is_directory
from tf_dynemb.format import crc32c
from tf_dynemb.format.table_entry import TableEntry
from tf_dynemb.storage.column_writer import Output
from tf_dynemb.storage.part import BLOCK_BYTES, Part
from tf_dynemb.storage.store_folder import StoreFolder, naming

# The least bytes of a part of a file that is sent; stores take at most 10,000 parts.
_PART_BYTES = 8 << 20
_PARTS = 5000
_UNIT = 1 << 20
# The pieces of a column that wait to be sent.
_WAITING = 2


class StoredPart(Part):
    """The part of a snapshot that one process writes to a folder of a store.

    A column whose number of rows is known is sent as it is written. All others, the indexes, the
    keys (which the indexes are built from) and the dense variables are written to a temporary
    folder, and sent by `with_files`.

    Args:
        folder: the folder of the snapshot.
        rank, checksum, block_bytes: as of `Part`.
    """

    def __init__(
        self,
        folder: StoreFolder,
        rank: int = 0,
        checksum: crc32c.Checksum = crc32c.blocks,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._local = tempfile.TemporaryDirectory(prefix="tf_dynemb-")
        super().__init__(pathlib.Path(self._local.name), rank, checksum, block_bytes)
        self._folder = folder

    def with_files(self, tables: Sequence[TableEntry]) -> tuple[TableEntry, ...]:
        """Sends all files that were not sent yet; see `Part`."""
        entries = super().with_files(tables)
        # Rank 0 calls this again for the files of all ranks, after it has abandoned its own.
        files = sorted(os.listdir(self._directory)) if is_directory(self._directory) else []
        self._folder.put(self._directory, files)
        return entries

    def abandon(self) -> None:
        """Stops writing; see `Part`."""
        super().abandon()
        self._local.cleanup()

    def _output(self, file: str, header: bytes | None, data_bytes: int) -> Output:
        if header is None:
            return super()._output(file, header, data_bytes)
        return _StoreOutput(self._folder, file, header, data_bytes)


class _StoreOutput:
    """An `Output` to a file in a store, which another thread sends.

    Args:
        folder: the folder of the file.
        file: its name.
        header: its header.
        data_bytes: the number of bytes after the header.
    """

    def __init__(self, folder: StoreFolder, file: str, header: bytes, data_bytes: int) -> None:
        self.path = f"{folder.url}/{file}"
        self._header = header
        self._left = data_bytes
        part_bytes = max(_PART_BYTES, -(-data_bytes // _PARTS))
        self._part_bytes = -(-part_bytes // _UNIT) * _UNIT
        self._folder, self._name = folder, file
        self._file: Any = None
        self._pending: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        self._sender = concurrent.futures.ThreadPoolExecutor(1)
        if not data_bytes:
            self._submit_end()

    def write(self, data: memoryview) -> None:
        """Sends bytes; what is complete is closed, which frees its memory."""
        self._left -= data.nbytes
        if self._left < 0:
            self._refuse()
        self._submit(self._send, bytes(data))
        if not self._left:
            self._submit_end()

    def finish(self, header: bytes) -> None:
        """Waits until all is there."""
        if header != self._header or self._left:
            self._refuse()
        while self._pending:
            self._wait()

    def abandon(self) -> None:
        """Ends the transfer; the store drops the parts that it has."""
        self._sender.shutdown(cancel_futures=True)
        self._pending.clear()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True  # otherwise its end completes it

    def _refuse(self) -> NoReturn:
        self.abandon()
        raise OSError(f"{self.path} does not have the expected rows.")

    def _submit(self, send: Callable[..., None], *args: bytes) -> None:
        while len(self._pending) >= _WAITING:
            self._wait()
        self._pending.append(self._sender.submit(send, *args))

    def _submit_end(self) -> None:
        self._submit(self._complete)
        self._sender.shutdown(wait=False)

    def _wait(self) -> None:
        try:
            self._pending.popleft().result()
        except BaseException:
            self.abandon()
            raise

    def _send(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._folder.open_new(self._name, self._part_bytes)
            data = self._header + data
        with naming(self.path):
            self._file.write(data)

    def _complete(self) -> None:
        if self._file is None:
            self._folder.write(self._name, self._header)
            return
        with naming(self.path):
            self._file.close()
        self._file = None

"""Checksums of the blocks of a file that is already there."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from tf_dynemb.storage.crc32c import Checksum
from tf_dynemb.storage.errors import DataLossError

# What is read at a time, at least.
_READ_BYTES = 1 << 22


def checksums(
    path: pathlib.Path, size: int, block_bytes: int, checksum: Checksum
) -> Iterator[tuple[int, list[int]]]:
    """Reads a file's first `size` bytes, some blocks at a time.

    Yields:
        the byte offset after these blocks, and their checksums.

    Raises:
        DataLossError: the file is shorter, or missing.
    """
    buffer = np.empty(min(size, block_bytes * max(1, _READ_BYTES // block_bytes)), np.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            end = 0
            while end < size:
                part = buffer[: size - end]
                filled = 0
                while filled < part.size:
                    count = file.readinto(part[filled:].data)
                    if not count:
                        raise DataLossError(f"{path} ends at byte offset {end + filled}.")
                    filled += count
                end += part.size
                yield end, checksum(part, 0, block_bytes, block_bytes)
    except FileNotFoundError as error:
        raise DataLossError(f"{path} is missing.") from error

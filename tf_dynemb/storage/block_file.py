"""Checksums of the blocks of an existing file."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from tf_dynemb.storage.crc32c import Checksum
from tf_dynemb.storage.errors import DataLossError

# The minimum number of bytes that are read at a time.
_READ_BYTES = 1 << 22


def checksums(
    path: pathlib.Path, size: int, block_bytes: int, checksum: Checksum
) -> Iterator[tuple[int, list[int]]]:
    """Reads the first `size` bytes of a file, several blocks at a time.

    Yields:
        The byte offset after these blocks, and their checksums.

    Raises:
        DataLossError: the file is shorter, or missing.
    """
    buffer = np.empty(min(size, block_bytes * max(1, _READ_BYTES // block_bytes)), np.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            end = 0
            while end < size:
                blocks = buffer[: size - end]
                filled = 0
                while filled < blocks.size:
                    count = file.readinto(blocks[filled:].data)
                    if not count:
                        raise DataLossError(f"{path} ends at byte offset {end + filled}.")
                    filled += count
                end += blocks.size
                yield end, checksum(blocks, 0, block_bytes, block_bytes)
    except FileNotFoundError as error:
        raise DataLossError(f"{path} is missing.") from error

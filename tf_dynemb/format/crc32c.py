"""CRC32C (RFC 3720) in numpy, with no loop over bytes.

The bits of a message are the coefficients of a polynomial. Its first bit, the lowest bit of the
first byte, belongs to the highest power of x. Polynomials are added by xor, so equal terms cancel.
Apart from inversions at the start and the end, the CRC is the remainder of the message, followed by
32 zeros, in a division by a polynomial P. The remainder of a sum is the sum of the remainders. The
CRC is therefore the xor of (x^i modulo P) over the powers i whose bits are set. `_powers` has these
remainders for the bits of 5685 bytes.

`_fold` shortens a longer message to 5685 bytes with the same remainder, by the identity
x^5685 = x^1362 + x^426 + 1 modulo P:

- A set bit can be cleared if the bits 5685, 5685 - 426 and 5685 - 1362 places after it are flipped.
- The square of a sum is the sum of the squares, because the mixed terms cancel. The square of the
  identity therefore has doubled powers, and is also true. Squared three times, it has the powers
  times 8, so the rule holds for bytes: a byte can be cleared if it is xored into the bytes 5685,
  5685 - 426 and 5685 - 1362 places after it. Squared six times, it gives the rule for words of 64
  bits.
- A run of 5685 - 1362 bytes or words can be cleared at once, because each is xored only into ones
  after the run.

Words are folded first, and then the bytes of the words that remain.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tf_dynemb.format.errors import DataLossError

Bytes: TypeAlias = npt.NDArray[np.uint8]

# The minimum number of bytes of a file that are read at a time.
_READ_BYTES = 1 << 22

# The type of `blocks` and of its replacements.
Checksum: TypeAlias = Callable[[Bytes, int, int, int], list[int]]

# 0x1EDC6F41, reflected: bit 31 - i is the coefficient of x^i; x^32 is implied.
POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF

# x^_SPAN = x^_TAPS[0] + x^_TAPS[1] + 1 modulo P, found by search: among the identities of four
# powers, one with a small span and a long run.
_SPAN = 5685
_TAPS = (1362, 426)

# The bytes that are folded at a time: they and their copy fit the second-level cache.
_CHUNK = 1 << 18


def crc32c(data: bytes | bytearray | memoryview | npt.NDArray[np.generic], initial: int = 0) -> int:
    """Returns the CRC32C of bytes.

    Args:
        data: any contiguous buffer.
        initial: the CRC32C of the bytes before `data`, if `data` continues them.
    """
    array = np.frombuffer(data, np.uint8)
    register = initial ^ _ONES
    for begin in range(0, array.size, _CHUNK):
        register = _advance(array[begin : begin + _CHUNK], register)
    return register ^ _ONES


def blocks(data: Bytes, initial: int, room: int, block_bytes: int) -> list[int]:
    """Returns the CRC32C of each block that `data` fills or continues.

    Args:
        data: uint8 [n].
        initial: the checksum of the bytes of the first block that came before `data`.
        room: the maximum number of bytes of `data` that belong to that first block.
        block_bytes: the size of each further block; the last one can be shorter.

    Returns:
        The checksum of the first block so far (`initial` if `data` is empty), and the checksum of
        each further block.
    """
    checksums = [crc32c(data[:room], initial)]
    checksums += [crc32c(data[i : i + block_bytes]) for i in range(room, data.size, block_bytes)]
    return checksums


def combine(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC32C of two adjacent ranges, given the CRC32C of each and the second's size."""
    shifted = first
    power = 1 << 23
    remaining = second_bytes
    while remaining:
        if remaining & 1:
            shifted = _multiply(shifted, power)
        power = _multiply(power, power)
        remaining >>= 1
    return shifted ^ second


def _advance(data: Bytes, register: int) -> int:
    """Returns the register after at least one and at most `_CHUNK` bytes."""
    words = -(-data.size // 8)
    folded = np.zeros(8 * words, np.uint8)  # zeros in front change nothing
    start = folded.size - data.size
    folded[start:] = data
    head = min(4, data.size)
    folded[start : start + head] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8)[:head]
    if words > _SPAN:
        folded = _fold(folded.view(np.uint64)).view(np.uint8)
    if folded.size > _SPAN:
        folded = _fold(folded)
    bits = np.unpackbits(folded, bitorder="little")
    terms = _powers()[-bits.size :] * bits
    return int(np.bitwise_xor.reduce(terms)) ^ register >> 8 * head


def _fold(digits: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    """Folds all digits into the last `_SPAN` digits, and returns these. Changes `digits`."""
    run = _SPAN - max(_TAPS)
    lags = (_SPAN, *(_SPAN - tap for tap in _TAPS))
    surplus = digits.size - _SPAN
    for begin in range(0, surplus, run):
        end = min(begin + run, surplus)
        for lag in lags:
            target = digits[begin + lag : end + lag]
            np.bitwise_xor(target, digits[begin:end], out=target)
    return digits[surplus:]


@functools.cache
def _powers() -> npt.NDArray[np.uint32]:
    """Returns x^i modulo P for each bit of `_SPAN` bytes, in their order.

    The last bit represents x^32, because a CRC is the remainder of the message followed by 32
    zeros.
    """
    powers = np.array([POLYNOMIAL], np.uint32)
    step = 1 << 30
    while powers.size < 8 * _SPAN:
        powers = np.concatenate([powers, _multiply_all(powers, step)])
        step = _multiply(step, step)
    return np.ascontiguousarray(powers[8 * _SPAN - 1 :: -1])


def _multiply(value: int, factor: int) -> int:
    """Returns the product modulo P; bit 31 - i of each factor is the coefficient of x^i."""
    product = 0
    for i in range(32):
        if factor << i & 1 << 31:
            product ^= value
        value = value >> 1 ^ (value & 1) * POLYNOMIAL
    return product


def _multiply_all(values: npt.NDArray[np.uint32], factor: int) -> npt.NDArray[np.uint32]:
    """Returns each value times `factor`, modulo P."""
    product = np.zeros_like(values)
    one = np.uint32(1)
    shifted = values
    for i in range(32):
        if factor << i & 1 << 31:
            product ^= shifted
        shifted = shifted >> one ^ (shifted & one) * np.uint32(POLYNOMIAL)
    return product


def of_file(
    path: pathlib.Path, size: int, block_bytes: int, checksum: Checksum
) -> Iterator[tuple[int, list[int]]]:
    """Computes the checksums of the first `size` bytes of a file, several blocks at a time.

    Yields:
        The byte offset after these blocks, and their checksums.

    Raises:
        DataLossError: the file is shorter, or missing.
    """
    end = 0
    for part in parts_of(path, size, block_bytes):
        end += part.size
        yield end, checksum(part, 0, block_bytes, block_bytes)


def parts_of(path: pathlib.Path, size: int, block_bytes: int) -> Iterator[Bytes]:
    """Reads the first `size` bytes of a file, several blocks at a time.

    Yields:
        The bytes of these blocks; the next ones take their place in memory.

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
                yield part
    except FileNotFoundError as error:
        raise DataLossError(f"{path} is missing.") from error

"""CRC32C: RFC 3720's examples, and a bit-by-bit reference."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tf_dynemb.format import crc32c

SETTINGS = hypothesis.settings(max_examples=60)

# RFC 3720, B.4.
VECTORS = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    bytes.fromhex(
        "01c00000000000000000000000000000 14000000000004000000001400000018"
        "28000000000000000200000000000000"
    ): 0xD9963A56,
}

# Sizes around those at which the algorithm changes: bytes, then words of 64 bits, then chunks.
EDGES = [
    edge + offset
    for edge in (0, 8, 64, crc32c._SPAN, 8 * crc32c._SPAN, crc32c._CHUNK)
    for offset in (-9, -8, -7, -1, 0, 1, 7, 8, 9)
    if edge + offset >= 0
]

SIZES = st.one_of(st.integers(0, 20), st.integers(0, 20_000), st.sampled_from(EDGES))
CHECKSUMS = st.integers(0, 2**32 - 1)


def reference(data, initial=0):
    register = initial ^ 0xFFFFFFFF
    for byte in bytes(data):
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def random_bytes(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize(("data", "expected"), VECTORS.items())
def test_examples_of_the_standard(data, expected):
    assert crc32c.crc32c(data) == expected == reference(data)


@hypothesis.given(SIZES, CHECKSUMS, st.integers(0, 2**32))
@SETTINGS
def test_any_size_and_initial(size, initial, seed):
    data = random_bytes(size, seed)
    assert crc32c.crc32c(data, initial) == reference(data, initial)


@pytest.mark.parametrize("size", EDGES)
def test_sizes_at_which_the_algorithm_changes(size):
    data = random_bytes(size, size)
    assert crc32c.crc32c(data, 77) == reference(data, 77)


def test_data_is_unchanged_and_may_be_any_buffer():
    data = random_bytes(60_000, 1)
    copy = data.copy()
    expected = crc32c.crc32c(data)
    np.testing.assert_array_equal(data, copy)
    for same in (data.tobytes(), bytearray(data), memoryview(data), data.view(np.float32)):
        assert crc32c.crc32c(same) == expected


@hypothesis.given(
    size=st.integers(0, 300),
    initial=CHECKSUMS,
    room=st.integers(0, 300),
    block_bytes=st.integers(1, 120),
    seed=st.integers(0, 2**32),
)
@SETTINGS
def test_blocks(size, initial, room, block_bytes, seed):
    data = random_bytes(size, seed)
    expected = [reference(data[:room], initial)]
    for begin in range(room, size, block_bytes):
        expected.append(reference(data[begin : begin + block_bytes]))
    assert crc32c.blocks(data, initial, room, block_bytes) == expected


@hypothesis.given(
    st.binary(max_size=80), st.one_of(st.binary(max_size=80), st.just(bytes(range(256)) * 9))
)
@SETTINGS
def test_combine(first, second):
    combined = crc32c.combine(reference(first), reference(second), len(second))
    assert combined == reference(first + second)


def test_the_identity_behind_folding():
    power = 1 << 31  # x^0
    powers = [power]
    for _ in range(crc32c._SPAN):
        power = power >> 1 ^ (crc32c.POLYNOMIAL if power & 1 else 0)
        powers.append(power)
    first, second = crc32c._TAPS
    assert powers[crc32c._SPAN] == powers[first] ^ powers[second] ^ powers[0]

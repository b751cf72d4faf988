"""The key index: against a dict, with keys that collide, and with damage."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tf_dynemb.format import key_index
from tf_dynemb.storage import DataLossError

SETTINGS = hypothesis.settings(max_examples=80)
DTYPES = (np.int64, np.int32, np.uint64, np.uint32)
MASK = 2**64 - 1


def mix(key, bits, salt=0):
    """Returns the hash by the formula of docs/file_format.md, in Python's integers."""
    z = ((key % 2**bits ^ salt) + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def unmix(hashed):
    """Returns the 64-bit key with the given hash: the inverse of `mix`."""

    def unshift(z, bits):
        result = z
        for _ in range(64 // bits):
            result = z ^ result >> bits
        return result

    z = unshift(hashed, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return (unshift(z, 30) - 0x9E3779B97F4A7C15) & MASK


def check_index(index, keys, salt):
    """Checks the rules of the file format for an index."""
    assert index.dtype == np.uint32
    slots = index.size
    assert slots & (slots - 1) == 0
    assert slots >= 4
    assert slots >= 2 * keys.size
    assert slots == 4 or slots // 2 < 2 * keys.size
    assert sorted(index[index > 0]) == list(range(1, keys.size + 1))
    for slot in np.flatnonzero(index):
        key = int(keys[index[slot] - 1])
        home = mix(key, 8 * keys.itemsize, salt) >> (64 - (slots.bit_length() - 1))
        between = (home + np.arange((slot - home) % slots)) % slots
        assert index[between].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_mix_is_splitmix64(dtype):
    extremes = np.iinfo(dtype)
    keys = np.array([extremes.min, extremes.min + 1, 0, 1, 12345, extremes.max], dtype)
    expected = [mix(int(key), 8 * keys.itemsize) for key in keys]
    assert key_index.mix(keys).tolist() == expected
    assert mix(0, 64) == 0xE220A8397B1DCDAF  # the generator's first output from seed 0


def test_mix_takes_integers_only():
    with pytest.raises(TypeError, match="float32"):
        key_index.mix(np.zeros(3, np.float32))


@hypothesis.given(st.data(), st.sampled_from(DTYPES), st.sampled_from([3, 16, 1 << 15]))
@SETTINGS
def test_find_agrees_with_a_dict(data, dtype, chunk):
    extremes = np.iinfo(dtype)
    key = st.one_of(
        st.integers(int(extremes.min), int(extremes.max)),
        st.integers(extremes.min, extremes.min + 40),
    )
    keys = np.array(data.draw(st.lists(key, unique=True, max_size=60)), dtype)
    others = data.draw(st.lists(key, max_size=20))
    queries = np.array([*others, *keys.tolist(), *keys[:3].tolist()], dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "_CHUNK", chunk)
        index, salt = key_index.build(keys)
        check_index(index, keys, salt)
        found = key_index.find(index, keys, queries, salt)
    position = {key: i for i, key in enumerate(keys.tolist())}
    assert found.dtype == np.int64
    assert found.tolist() == [position.get(query, -1) for query in queries.tolist()]


@pytest.mark.parametrize("home", [0, 0x7FF << 53, MASK])
def test_keys_that_all_collide(home):
    """All keys have the same home slot; probing continues from the last slot to the first."""
    first = key_index.salt(0)
    keys = np.array([unmix(home ^ i) ^ first for i in range(500)], np.uint64)
    assert key_index.mix(keys, first).tolist() == [home ^ i for i in range(500)]
    index = np.zeros(1024, np.uint32)
    assert key_index._build(keys, index, first, None)
    check_index(index, keys, first)
    assert key_index.find(index, keys, keys, first).tolist() == list(range(500))
    absent = np.array([unmix(home ^ i) ^ first for i in range(500, 520)], np.uint64)
    assert (key_index.find(index, keys, absent, first) == -1).all()
    index, salt = key_index.build(keys)
    assert salt == key_index.salt(1)
    check_index(index, keys, salt)


def passed(index, keys, salt):
    """Returns the number of slots that the probes of all keys pass."""
    slots = np.flatnonzero(index)
    homes = key_index._homes(keys[index[slots].astype(np.int64) - 1], index.size, salt)
    return int(((slots - homes) % index.size).sum())


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_keys_sharded_by_the_same_hash(bits):
    """Without a salt, all home slots are in 1/2^bits of the index."""
    ids = np.arange(40_000 << bits)
    keys = ids[key_index.mix(ids) >> np.uint64(64 - bits) == 0]
    index, salt = key_index.build(keys)
    assert salt == key_index.salt(0)
    assert passed(index, keys, salt) < keys.size


def test_keys_that_are_bad_under_several_salts():
    """The first salt under which probes pass few slots is used."""
    salts = [key_index.salt(number) for number in range(4)]
    assert len(set(salts)) == 4
    keys = np.random.default_rng(1).integers(0, 2**64, 3_000_000, np.uint64)
    for salt in salts[:3]:
        keys = keys[key_index.mix(keys, salt) >> np.uint64(60) == 0]
    keys = np.unique(keys)[:600]
    index, salt = key_index.build(keys)
    assert salt == salts[3]
    check_index(index, keys, salt)


def test_keys_that_are_bad_under_every_salt(monkeypatch):
    monkeypatch.setattr(key_index, "salt", lambda number: 0)
    keys = np.array([unmix(i) for i in range(300)], np.uint64)
    index, salt = key_index.build(keys)
    check_index(index, keys, salt)


def test_build_in_a_given_array():
    keys = np.random.default_rng(3).permutation(200_000).astype(np.int64) - 50_000
    out = np.zeros(key_index.index_size(keys.size), np.uint32)
    index, salt = key_index.build(keys, out)
    assert np.shares_memory(index, out)
    queries = np.arange(-60_000, 160_000)
    found = key_index.find(index, keys, queries, salt)
    there = (queries >= -50_000) & (queries < 150_000)
    np.testing.assert_array_equal(found >= 0, there)
    np.testing.assert_array_equal(keys[found[there]], queries[there])


def test_no_keys():
    none = np.empty(0, np.int64)
    index, salt = key_index.build(none)
    assert index.tolist() == [0, 0, 0, 0]
    assert key_index.find(index, none, np.array([0, -1]), salt).tolist() == [-1, -1]
    two_keys = np.array([5, 6])
    index, salt = key_index.build(two_keys)
    assert key_index.find(index, two_keys, none, salt).tolist() == []


@pytest.mark.parametrize(
    ("rows", "slots"), [(0, 4), (1, 4), (2, 4), (3, 8), (4, 8), (5, 16), (2**31, 2**32)]
)
def test_index_size(rows, slots):
    assert key_index.index_size(rows) == slots


def test_position_out_of_range_is_data_loss():
    keys = np.arange(5)
    index, salt = key_index.build(keys)
    index[index == 5] = 6
    with pytest.raises(DataLossError, match="position 5 of 5 keys"):
        key_index.find(index, keys, keys, salt)


def test_index_without_an_empty_slot_is_data_loss():
    keys = np.arange(5)
    index = np.ones(16, np.uint32)
    with pytest.raises(DataLossError, match="no empty slot"):
        key_index.find(index, keys, np.array([77]), 0)


def test_find_in_a_damaged_index_terminates():
    keys = np.arange(40)
    index, salt = key_index.build(keys)
    rng = np.random.default_rng(5)
    for _ in range(300):
        damaged = index.copy()
        damaged[rng.integers(0, index.size, 5)] ^= np.uint32(1) << rng.integers(0, 7, 5, np.uint32)
        try:
            found = key_index.find(damaged, keys, np.arange(-5, 60), salt)
        except DataLossError:
            continue
        there = found >= 0
        np.testing.assert_array_equal(keys[found[there]], np.arange(-5, 60)[there])


def test_wrong_size_and_dtype_are_refused():
    keys = np.arange(5)
    with pytest.raises(DataLossError, match="has 8 slots, but 5 keys need 16"):
        key_index.find(np.zeros(8, np.uint32), keys, keys, 0)
    with pytest.raises(TypeError, match="queries must be int64"):
        key_index.find(np.zeros(16, np.uint32), keys, keys.astype(np.int32), 0)

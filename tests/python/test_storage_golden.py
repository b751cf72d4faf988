"""The golden files of every format version: all values are compared."""

import pathlib

import numpy as np
import pytest

from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain, InitializerEntry, StateEntry

GOLDEN = pathlib.Path(__file__).parent / "golden"
VERSIONS = (1, 2)
UTC_NS = 1_800_000_000_123_456_789

# The salts of indexes, which version 1 lacks.
SALTS = {1: [0, 0, 0, 0], 2: [0xE220A8397B1DCDAF, 0, 0xE220A8397B1DCDAF, 0xE220A8397B1DCDAF]}
# The columns of version 2 that differ from version 1.
INDEXES = {
    ("user", 0, "index"): np.array([0, 0, 2, 1, 0, 5, 0, 0, 0, 0, 4, 0, 0, 0, 0, 3], np.uint32),
    ("page", 1, "index"): np.array([0, 2, 3, 0, 1, 0, 0, 0], np.uint32),
}

BASE_COLUMNS = {
    ("user", 0, "keys"): np.array([5, -1, 4611686018427387904, 0, -9223372036854775808]),
    ("user", 0, "vectors"): np.array(
        [[0, 0.25], [0.5, 0.75], [1, 1.25], [1.5, 1.75], [2, 2.25]], np.float32
    ),
    ("user", 0, "state"): np.array(
        [
            [0, 2, 4, 6, 8],
            [10, 12, 14, 16, 18],
            [20, 22, 24, 26, 28],
            [30, 32, 34, 36, 38],
            [40, 42, 44, 46, 48],
        ],
        np.float32,
    ),
    ("user", 0, "updates"): np.array([0, 1, 2, 3, 4], np.uint32),
    ("user", 0, "accesses"): np.array([4, 4, 4, 4, 90], np.uint32),
    ("user", 0, "index"): np.array([3, 0, 0, 0, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 4, 2], np.uint32),
    ("user", 1, "keys"): np.empty(0, np.int64),
    ("user", 1, "vectors"): np.empty((0, 2), np.float32),
    ("user", 1, "state"): np.empty((0, 5), np.float32),
    ("user", 1, "updates"): np.empty(0, np.uint32),
    ("user", 1, "accesses"): np.empty(0, np.uint32),
    ("user", 1, "index"): np.array([0, 0, 0, 0], np.uint32),
    ("item/ü", 0, "keys"): np.array([-3, 2147483647], np.int32),
    ("item/ü", 0, "vectors"): np.array([[16256, 49024, 0], [16384, 32640, 1]], np.uint16),
    ("item/ü", 0, "updates"): np.array([7, 8], np.uint32),
    ("item/ü", 0, "accesses"): np.array([9, 4294967295], np.uint32),
    ("item/ü", 0, "index"): np.array([0, 2, 0, 1], np.uint32),
    ("page", 1, "keys"): np.array([9, 18446744073709551615, 9223372036854775808], np.uint64),
    ("page", 1, "vectors"): np.array([[0.25], [65504], [-0.0]], np.float16),
    ("page", 1, "updates"): np.array([1, 2, 3], np.uint32),
    ("page", 1, "accesses"): np.array([1, 2, 3], np.uint32),
    ("page", 1, "index"): np.array([0, 0, 3, 0, 0, 1, 0, 2], np.uint32),
}

DELTA_COLUMNS = {
    ("user", 0, "keys"): np.array([0, 6]),
    ("user", 0, "vectors"): np.array([[-1, -2], [0.1, 1e-40]], np.float32),
    ("user", 0, "state"): np.array([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], np.float32),
    ("user", 0, "updates"): np.array([3, 2], np.uint32),
    ("user", 0, "accesses"): np.array([3, 4], np.uint32),
    ("user", 0, "deleted"): np.array([4611686018427387904]),
    ("item/ü", 0, "keys"): np.empty(0, np.int32),
    ("item/ü", 0, "vectors"): np.empty((0, 3), np.uint16),
    ("item/ü", 0, "updates"): np.empty(0, np.uint32),
    ("item/ü", 0, "accesses"): np.empty(0, np.uint32),
    ("item/ü", 0, "deleted"): np.empty(0, np.int32),
    ("page", 0, "keys"): np.array([18446744073709551615, 1], np.uint64),
    ("page", 0, "vectors"): np.array([[1.5], [-2]], np.float16),
    ("page", 0, "updates"): np.array([1, 0], np.uint32),
    ("page", 0, "accesses"): np.array([1, 3], np.uint32),
    ("page", 0, "deleted"): np.array([9223372036854775808, 8, 9], np.uint64),
}


def check_columns(snapshot, expected):
    snapshot.verify()
    found = {
        (table.name, shard.rank, column)
        for table in snapshot.manifest.tables
        for shard in table.shards
        for column in shard.files
    }
    assert found == set(expected)
    for (table, rank, column), values in expected.items():
        array = snapshot.column(table, column, rank)
        assert array.dtype == values.dtype
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, values, strict=True)
        file = snapshot.manifest.table(table)[1].shards
        (name,) = (s.files[column].file for s in file if s.rank == rank)
        np.testing.assert_array_equal(np.load(snapshot.directory / name), values, strict=True)


def check_tables(manifest):
    user, item, page = manifest.tables
    assert (user.name, user.dimension, user.key_type, user.dtype, user.seed) == (
        "user",
        2,
        "int64",
        "float32",
        42,
    )
    assert user.initializer == InitializerEntry(("uniform",), (-0.05, 0.05))
    assert user.state == StateEntry("adam", (2, 2, 1), (0.0, 0.0, 0.0))
    assert (item.name, item.dimension, item.key_type, item.dtype, item.seed) == (
        "item/ü",
        3,
        "int32",
        "bfloat16",
        -7,
    )
    assert item.initializer == InitializerEntry(
        ("constant", "normal", "uniform"), (0.5, 0, 0, 1, -1, 1)
    )
    assert item.state is None
    assert (page.name, page.dimension, page.key_type, page.dtype, page.seed) == (
        "page",
        1,
        "uint64",
        "float16",
        18446744073709551615,
    )
    assert page.initializer == InitializerEntry(("truncated_normal",), (0.0, 0.01))
    assert page.state == StateEntry("sgd", (), ())


def shards(manifest):
    return [
        [(shard.rank, shard.rows, shard.deleted, shard.base_tick) for shard in table.shards]
        for table in manifest.tables
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_base(version):
    snapshot = Chain.open(GOLDEN / f"v{version}" / "chain").base
    manifest = snapshot.manifest
    assert (manifest.kind, manifest.id, manifest.parent) == (
        "base",
        "000000000000000000000000000000a0",
        None,
    )
    assert (manifest.since, manifest.watermark, manifest.watermark_utc_ns) == (
        0,
        2199023255552,
        UTC_NS,
    )
    assert (manifest.world_size, manifest.writer, manifest.block_bytes) == (
        2,
        "tf_dynemb 0.1.0",
        256,
    )
    assert manifest.optimizer == {"name": "Adam", "config": {"amsgrad": False}, "iterations": 77}
    assert manifest.continues == ("eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee",)
    check_tables(manifest)
    assert shards(manifest) == [
        [(0, 5, 0, 100), (1, 0, 0, 100)],
        [(0, 2, 0, 1099511627776)],
        [(1, 3, 0, 0)],
    ]
    salts = [shard.index_salt for table in manifest.tables for shard in table.shards]
    assert salts == SALTS[version]
    check_columns(snapshot, BASE_COLUMNS | (INDEXES if version > 1 else {}))


@pytest.mark.parametrize("version", VERSIONS)
def test_lookups(version):
    reader = Reader(GOLDEN / f"v{version}" / "chain")
    pages = np.array([9, 2**64 - 1, 2**63, 1, 8], np.uint64)
    assert reader.contains(pages, "page").tolist() == [False, True, False, True, False]
    assert reader.lookup(pages[1:4:2], "page").tolist() == [[1.5], [-2.0]]
    users = np.array([5, -1, 2**62, 0, -(2**63), 6, 7])
    there = [True, True, False, True, True, True, False]
    assert reader.contains(users, "user").tolist() == there


@pytest.mark.parametrize(
    ("path", "id_", "parent", "since"),
    [
        (
            "chain",
            "000000000000000000000000000000a1",
            "000000000000000000000000000000a0",
            2199023255552,
        ),
        ("deltas", "000000000000000000000000000000a2", "f" * 32, 0),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_delta(version, path, id_, parent, since):
    chain = Chain.open(GOLDEN / f"v{version}" / path)
    assert (chain.base is None) == (path == "deltas")
    (snapshot,) = chain.deltas
    manifest = snapshot.manifest
    assert (manifest.kind, manifest.id, manifest.parent) == ("delta", id_, parent)
    assert (manifest.since, manifest.watermark) == (since, 2199023255557)
    assert (manifest.watermark_utc_ns, manifest.world_size) == (UTC_NS + 1, 1)
    assert (manifest.block_bytes, manifest.optimizer, manifest.continues) == (128, None, ())
    check_tables(manifest)
    assert shards(manifest) == [
        [(0, 2, 1, 2199023255552)],
        [(0, 0, 0, 2199023255552)],
        [(0, 2, 3, 2199023255552)],
    ]
    check_columns(snapshot, DELTA_COLUMNS)


def test_deltas_that_change_other_rows():
    chain = Chain.open(GOLDEN / "v3" / "chain")
    assert [delta.manifest.tables[0].shards[0].rows for delta in chain.deltas] == [3, 3]
    texts = [(s.directory / "MANIFEST.json").read_text() for s in chain.snapshots]
    assert ['"version": 3' in text for text in texts] == [False, True, True]
    expected = np.load(GOLDEN / "v3" / "expected.npy")
    np.testing.assert_allclose(
        Reader(GOLDEN / "v3" / "chain").lookup(range(12)), expected, 3e-6, 3e-6
    )


def test_dense_variables():
    base, delta = Chain.open(GOLDEN / "dense").snapshots
    expected = {
        "tower/0/kernel": np.array([[0, 1, 2], [3, 4, 5]], np.float32),
        "tower/0/bias": np.array([16256, 49024, 0], np.uint16),
        "steps": np.array(2**40),
        "ä": np.array([True, False]),
        "empty": np.zeros([0, 2], np.float16),
    }
    for snapshot, steps in ((base, 2**40), (delta, -1)):
        snapshot.verify()
        found = snapshot.dense("weights")
        assert found.keys() == expected.keys()
        expected["steps"] = np.array(steps)
        for name, value in expected.items():
            assert found[name].values.dtype == value.dtype
            assert np.array_equal(found[name].values, value)
    assert found["tower/0/bias"].dtype == "bfloat16"
    seeds = [base.dense("training", rank)["seeds/dropout"].values.tolist() for rank in (0, 1)]
    assert seeds == [[7, 2**32 - 1], [1, 2]]
    assert delta.dense("training", 1)["seeds/dropout"].values.tolist() == [7, 2**32 - 1]
    reader = Reader(GOLDEN / "dense")
    assert reader.extra == {"hour": 1, "text": "ü", "list": [1.5, None, {"a": True}]}
    assert reader.dense()["tower/0/bias"].tolist() == [1.0, -1.0, 0.0]
    assert reader.dense()["steps"] == -1


# The rows of golden/v2 with keys below 9: of users, of a page, and of an item.
V4 = {
    "float16": (
        [[0.0, 0.25], [0.5, 0.75], [2.0, 2.25], [-1.0, -2.0], [0.0999755859375, 0.0]],
        [[-2.0]],
        [[1.0, -1.0, 0.0]],
    ),
    "int8": (
        [
            [0.0, 0.2499847412109375],
            [0.5019378662109375, 0.7499542236328125],
            [2.0018463134765625, 2.2498626708984375],
            [-1.0078125, -1.9998779296875],
            [0.09998178482055664, 0.0],
        ],
        [[-1.9998779296875]],
        [[0.99993896484375, -0.99993896484375, 0.0]],
    ),
    "int4": (
        [
            [0.0, 0.2501678466796875],
            [0.5, 0.7501678466796875],
            [2.0, 2.2501678466796875],
            [-0.99932861328125, -2.0],
            [0.1000213623046875, 0.0],
        ],
        [[-2.0]],
        [[1.0013427734375, -1.0, -0.0660400390625]],
    ),
}


@pytest.mark.parametrize("name", V4)
def test_formats_of_vectors(name):
    chain = Chain.open(GOLDEN / "v4" / name)
    for snapshot in chain.snapshots:
        snapshot.verify()
        assert '"version": 4' in (snapshot.directory / "MANIFEST.json").read_text()
        user, item, page = snapshot.manifest.tables
        assert (user.stored_as, user.dtype) == (name, "float32")
        # 16 bits are not made 16 bits again.
        assert (item.vector_format, page.vector_format) == (
            (None, None) if name == "float16" else (name, name)
        )
        assert snapshot.manifest.copy["rows"] == name
        assert snapshot.manifest.copy["where"] == {"key_below": 9}
    reader = Reader(GOLDEN / "v4" / name)
    users, pages, items = V4[name]
    keys = [5, -1, -(2**63), 0, 6]
    assert reader.lookup(keys, "user").tolist() == users
    assert reader.lookup([1], "page").tolist() == pages
    assert reader.lookup([-3], "item/ü").tolist() == items
    assert not reader.contains([2**62], "user").any()
    assert not reader.contains([2**31 - 1], "item/ü").any()
    assert not reader.contains([9, 2**64 - 1], "page").any()

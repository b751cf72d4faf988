"""Damaged dumps: an error names the file, and tables are unchanged; a wrong row is never loaded."""

import functools
import pathlib
import re
import shutil

import keras
import numpy as np
import pytest
import table_reader
import tensorflow as tf
from chain_reader import fold

import tf_dynemb as de
from tf_dynemb.persistence import columns
from tf_dynemb.storage import Chain, DataLossError

ERRORS = (DataLossError, ValueError, FileNotFoundError)


def make_tables():
    """A table with state and one without, and their optimizer."""
    tables = [
        de.DynamicVariable(2, name="user", seed=1),
        de.DynamicVariable(3, name="item", seed=2, key_type=tf.int32, dtype=tf.bfloat16),
    ]
    return tables, de.OptimizerWrapper(keras.optimizers.Adagrad(0.5))


def step(optimizer, table, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup(keys) ** 2)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """A base, and a delta that changes and deletes some of its rows."""
    path = tmp_path_factory.mktemp("dumped")
    (user, item), optimizer = make_tables()
    step(optimizer, user, [1, -5, 2**40])
    item.lookup(tf.constant([4, -4, 9], tf.int32))
    de.dump(path, [user, item], optimizer, quiet=True)
    step(optimizer, user, [1, 77])
    user.erase([-5])
    item.upsert(tf.constant([9, 10], tf.int32), [[1.0, 2.0, 3.0]] * 2)
    item.erase(tf.constant([4], tf.int32))
    de.incremental_dump(path, [user, item], optimizer=optimizer, quiet=True)
    assert [len(rows.keys) for rows in fold(Chain.open(path)).values()] == [3, 3]
    return path


class Follower:
    """Tables that have other rows than the dump."""

    def __init__(self):
        self.tables, self.optimizer = make_tables()
        user, item = self.tables
        step(self.optimizer, user, [1, 3, 4])
        self.optimizer.attach(self.tables)
        item.upsert(tf.constant([9, 11], tf.int32), [[7.0, 8.0, 9.0]] * 2)
        self.before = self.state()

    def state(self):
        rows = table_reader.contents(self.tables)
        counts = [(len(table), dict(table.snapshots.items())) for table in self.tables]
        return rows, counts, int(self.optimizer.core.iterations)

    def is_unchanged(self):
        rows, *others = self.state()
        columns = ("keys", "vectors", "state", "updates")
        return table_reader.same(rows, self.before[0], columns) and others == list(self.before[1:])

    def load(self, path):
        de.load(path, self.tables, self.optimizer, quiet=True)


@pytest.fixture
def chain(dumped, tmp_path):
    """A copy to damage, its files, and its undamaged content."""
    path = tmp_path / "chain"
    shutil.copytree(dumped, path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "LOCK")
    assert len(files) == 2 + 2 * 10 + 2
    fresh = Follower()
    fresh.load(path)
    return path, files, fresh.state()[0]


def check_load(follower, path, file, undamaged, what) -> bool:
    """Returns whether a load failed. Checks that the tables are then unchanged, otherwise right."""
    error = None
    try:
        follower.load(path)
    except ERRORS as raised:
        error = raised
    if error is not None:
        assert str(file) in str(error), f"{what}: {error!r} names another file, or none"
        assert follower.is_unchanged(), f"{what}: {error!r}, but the tables changed"
        return True
    assert file.name == "MANIFEST.json", f"{what} was not detected"
    columns = ("keys", "vectors", "state", "updates")
    rows = table_reader.contents(follower.tables)
    assert table_reader.same(rows, undamaged, columns), f"{what} gave wrong rows"
    return False


@pytest.mark.slow
def test_every_truncation(chain):
    path, files, undamaged = chain
    folded = fold(Chain.open(path))
    follower = Follower()
    number = 0
    for file in files:
        content = file.read_bytes()
        # Columns are checked by their size alone, so every fifth size and the limits are enough.
        step = 1 if file.name == "MANIFEST.json" else 5
        ends = {127, 128, len(content) - 1}
        for size in sorted({*range(0, len(content), step), *(ends & set(range(len(content))))}):
            what = f"{file} of {size} instead of {len(content)} bytes"
            file.write_bytes(content[:size])
            if size == len(content) - 1 and file.name == "MANIFEST.json":
                # Only the final newline is missing, which has no meaning.
                assert table_reader.same(fold(Chain.open(path)), folded)
                assert not check_load(Follower(), path, file, undamaged, what)
                continue
            with pytest.raises(DataLossError, match=re.escape(str(file))):
                fold(Chain.open(path))
            if number % 10 == 0 or size in (0, 127, 128, len(content) - 1):
                assert check_load(follower, path, file, undamaged, what)
            number += 1
        file.write_bytes(content)
    assert number > 2000


@pytest.mark.parametrize("seed", range(4))
def test_random_flips(chain, seed):
    path, files, undamaged = chain
    rng = np.random.default_rng(seed)
    follower = Follower()
    for _ in range(250):
        # A file is drawn first, because manifests are longer than the other files.
        file = files[rng.integers(len(files))]
        content = file.read_bytes()
        flipped = bytearray(content)
        bit = int(rng.integers(8 * len(content)))
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        what = f"a flip of bit {bit % 8} of byte {bit // 8} of {file}"
        if not check_load(follower, path, file, undamaged, what):
            follower = Follower()
        file.write_bytes(content)
    follower.load(path)
    assert table_reader.same(table_reader.contents(follower.tables), undamaged)


def test_flips_in_the_first_members_of_a_manifest(chain):
    path, files, undamaged = chain
    follower = Follower()
    file = next(file for file in files if file.name == "MANIFEST.json" and "delta" in str(file))
    content = file.read_bytes()
    # The members that describe the snapshot that the delta continues. A wrong value may be valid.
    begin, end = content.index(b'"format"'), content.index(b'"writer"')
    for byte in range(begin, end):
        flipped = bytearray(content)
        flipped[byte] ^= 1 << byte % 8
        file.write_bytes(flipped)
        what = f"a flip in byte {byte} of {file}"
        if not check_load(follower, path, file, undamaged, what):
            follower = Follower()


def test_missing_and_replaced_files(chain):
    path, files, undamaged = chain
    follower = Follower()
    for file in files:
        content = file.read_bytes()
        file.unlink()
        assert check_load(follower, path, file, undamaged, f"without {file}")
        file.write_bytes(content)
    for one, other in zip(files[1:], files, strict=False):
        if one.parent == other.parent and one.stat().st_size == other.stat().st_size:
            content = one.read_bytes()
            one.write_bytes(other.read_bytes())
            if content != other.read_bytes():
                assert check_load(follower, path, one, undamaged, f"{one} is {other}")
            one.write_bytes(content)


def test_a_missing_delta(chain):
    path, _, _ = chain
    tables, optimizer = make_tables()
    de.load(path, tables, optimizer, quiet=True)
    tables[0].lookup([5])
    de.incremental_dump(path, tables, optimizer=optimizer, quiet=True)
    names = sorted(p.name for p in path.iterdir() if p.is_dir())
    shutil.rmtree(path / names[1])
    follower = Follower()
    with pytest.raises(DataLossError, match=f"a gap before .*{names[2]}"):
        follower.load(path)
    assert follower.is_unchanged()


def fail_on(function, call):
    """Wraps a function so that one of its calls fails."""
    calls = iter(range(1000))

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if next(calls) == call:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("call", range(4))
def test_tables_change_together_or_not_at_all(chain, monkeypatch, call):
    path, _, undamaged = chain
    follower = Follower()
    with monkeypatch.context() as patch:
        load_rows = columns.load_rows
        patch.setattr(columns, "load_rows", fail_on(load_rows, call))
        with pytest.raises(tf.errors.ResourceExhaustedError, match="no memory"):
            follower.load(path)
    assert follower.is_unchanged()
    follower.load(path)
    assert table_reader.same(table_reader.contents(follower.tables), undamaged)


def test_a_failed_load_keeps_the_state_of_the_optimizer(chain, monkeypatch):
    path, _, _ = chain
    follower = Follower()
    other = de.OptimizerWrapper(keras.optimizers.Adam())
    with monkeypatch.context() as patch:
        patch.setattr(columns, "load_rows", fail_on(columns.load_rows, 0))
        with pytest.raises(tf.errors.ResourceExhaustedError, match="no memory"):
            de.load(path, follower.tables, other, quiet=True)
    assert follower.is_unchanged()


def test_a_table_that_cannot_hold_the_rows(chain):
    path, _, _ = chain
    (user, _), optimizer = make_tables()
    small = de.DynamicVariable(
        3, name="item", key_type=tf.int32, dtype=tf.bfloat16, max_capacity=2, evict_strategy="none"
    )
    step(optimizer, user, [3])
    before = table_reader.contents([user, small])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="item"):
        de.load(path, [user, small], optimizer, quiet=True)
    assert table_reader.contents([user, small])["user"].same(before["user"])
    assert len(small) == 0


def test_apply_delta_verifies_before_it_changes_anything(chain):
    path, files, _ = chain
    base = files[0].parent
    tables, optimizer = make_tables()
    de.load(path, tables, optimizer, quiet=True)
    step(optimizer, tables[0], [1, 5])
    de.incremental_dump(path, tables, optimizer=optimizer, quiet=True)
    follower = Follower()
    de.load(base, follower.tables, follower.optimizer, quiet=True)
    follower.before = follower.state()
    # The last of two deltas is damaged; the first must not be applied either.
    last = Chain.open(path).last.directory
    for file in sorted(last.iterdir()):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        for damaged in (bytes(flipped), content[:-2]):
            file.write_bytes(damaged)
            with pytest.raises(DataLossError, match=file.name):
                de.apply_delta(path, follower.tables, follower.optimizer)
            assert follower.is_unchanged()
        file.write_bytes(content)
    de.apply_delta(path, follower.tables, follower.optimizer)
    found, expected = map(table_reader.contents, (follower.tables, tables))
    assert table_reader.same(found, expected)


V1 = pathlib.Path(__file__).parent / "golden" / "v1"


def golden_tables():
    return {
        "user": de.DynamicVariable(2, name="a"),
        "item/ü": de.DynamicVariable(3, name="b", key_type=tf.int32, dtype=tf.bfloat16),
        "page": de.DynamicVariable(1, name="c", key_type=tf.uint64, dtype=tf.float16),
    }


def as_dicts(tables):
    found = {}
    for name, table in tables.items():
        rows = table_reader.rows_of(table)
        found[name] = dict(zip(rows.keys.tolist(), rows.vectors.tolist(), strict=True))
    return found


GOLDEN = {
    "user": {
        5: [0, 0.25],
        -1: [0.5, 0.75],
        0: [-1, -2],
        6: [float(np.float32(0.1)), float(np.float32(1e-40))],
        -(2**63): [2, 2.25],
    },
    "item/ü": {-3: [16256, 49024, 0], 2**31 - 1: [16384, 32640, 1]},
    "page": {2**64 - 1: [1.5], 1: [-2]},
}
# The updates of the rows in the delta; older updates are outside a table's window of ticks.
GOLDEN_UPDATES = {
    "user": {0: 2**41 + 3, 6: 2**41 + 2},
    "item/ü": {},
    "page": {2**64 - 1: 2**41 + 1, 1: 2**41},
}


def test_golden_files():
    tables = golden_tables()
    watermark = de.load(V1 / "chain", tables, quiet=True)
    assert (watermark.id, watermark.tick) == (f"{0xA1:032x}", 2**41 + 5)
    assert as_dicts(tables) == GOLDEN
    updates = {}
    for name, table in tables.items():
        rows = table_reader.rows_of(table)
        pairs = zip(rows.keys.tolist(), rows.updates.tolist(), strict=True)
        updates[name] = {key: tick for key, tick in pairs if tick >= 2**41}
    assert updates == GOLDEN_UPDATES
    with pytest.raises(ValueError, match="contains deltas, but no dump"):
        de.load(V1 / "deltas", tables, quiet=True)
    with pytest.raises(ValueError, match="do not continue the content of these tables"):
        de.apply_delta(V1 / "deltas", golden_tables())
    assert as_dicts(tables) == GOLDEN


def test_golden_files_with_an_optimizer():
    user = de.DynamicVariable(2, name="user")
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam())
    with pytest.warns(UserWarning, match="the state of 'adam' .* is dropped"):
        de.load(V1 / "chain", [user], optimizer, quiet=True)
    assert as_dicts({"user": user})["user"] == GOLDEN["user"]
    assert int(optimizer.core.iterations) == 77
    assert not table_reader.rows_of(user).state.any()


def test_golden_deltas_continue_loaded_tables():
    tables = golden_tables()
    base = sorted((V1 / "chain").glob("*-base-*"))[0]
    de.load(base, tables, quiet=True)
    assert as_dicts(tables)["user"][2**62] == [1, 1.25]
    for table in tables.values():
        table.snapshots.note("f" * 32, 2**41)
    watermark = de.apply_delta(V1 / "deltas", tables)
    assert watermark.id == f"{0xA2:032x}"
    assert as_dicts(tables) == GOLDEN

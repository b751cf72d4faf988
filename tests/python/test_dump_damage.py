"""Loads that fail after all files were verified, and loads of golden files.

`test_damage.py` damages files.
"""

import functools
import pathlib

import keras
import numpy as np
import pytest
import table_reader
import tensorflow as tf
from damage_readers import Dumped, Load, make_tables, step

import tf_dynemb as de
from tf_dynemb.persistence import columns


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    return Dumped(tmp_path_factory.mktemp("dumped"))


def fail_on(function, call):
    """Wraps a function so that one of its calls fails."""
    calls = iter(range(1000))

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if next(calls) == call:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("call", range(6))
def test_tables_change_together_or_not_at_all(dumped, monkeypatch, call):
    follower = Load(dumped, dumped.path)
    with monkeypatch.context() as patch:
        load_rows = columns.load_rows
        patch.setattr(columns, "load_rows", fail_on(load_rows, call))
        with pytest.raises(tf.errors.ResourceExhaustedError, match="no memory"):
            follower.read()
    assert follower.has_kept(0)
    follower.read()
    assert follower.is_right()


def test_a_failed_load_keeps_the_state_of_the_optimizer(dumped, monkeypatch):
    follower = Load(dumped, dumped.path)
    other = de.OptimizerWrapper(keras.optimizers.Adam())
    with monkeypatch.context() as patch:
        patch.setattr(columns, "load_rows", fail_on(columns.load_rows, 0))
        with pytest.raises(tf.errors.ResourceExhaustedError, match="no memory"):
            de.load(dumped.path, follower.tables, other, quiet=True)
    assert follower.has_kept(0)


def test_a_table_that_cannot_hold_the_rows(dumped):
    (user, _), optimizer = make_tables()
    small = de.DynamicVariable(
        3, name="item", key_type=tf.int32, dtype=tf.bfloat16, max_capacity=2, evict_strategy="none"
    )
    step(optimizer, user, [3])
    before = table_reader.contents([user, small])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="item"):
        de.load(dumped.path, [user, small], optimizer, quiet=True)
    assert table_reader.contents([user, small])["user"].same(before["user"])
    assert len(small) == 0


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

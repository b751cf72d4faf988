"""The owners of keys and rows."""

import numpy as np
import pytest
import tensorflow as tf
from rank_threads import ranks_are_threads, run

import tf_dynemb as de
from tf_dynemb.parallel import ownership


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ranks_are_threads(monkeypatch):
        yield


def test_one_process_holds_everything():
    table = de.DynamicVariable(2, mode="localized:0")
    matrix = de.Variable(tf.zeros([5, 2]), mode="distributed")
    for variable in (table, matrix):
        assert ownership.owned(variable, np.arange(5)) is None
        assert not ownership.is_elsewhere(variable)
        assert ownership.share_of(variable, 5) == 5
    np.testing.assert_array_equal(ownership.global_rows(matrix), np.arange(5))
    np.testing.assert_array_equal(ownership.local_rows(matrix, np.arange(5)), np.arange(5))


@pytest.mark.parametrize("mode", [None, "distributed"])
@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_key_of_a_table_has_one_owner(size, key_type, mode):
    limits = np.iinfo(key_type.as_numpy_dtype)
    drawn = np.random.default_rng(0).integers(limits.min, limits.max, 4000, limits.dtype)
    keys = np.append(drawn, np.array([limits.min, 0, limits.max], limits.dtype))

    def masks(comm):
        table = de.DynamicVariable(1, key_type=key_type, mode=mode)
        assert not ownership.is_elsewhere(table)
        return ownership.owned(table, keys)

    found = np.array(run(size, masks))
    assert found.dtype == np.bool_
    assert (found.sum(0) == 1).all()
    expected = len(keys) / size
    assert (abs(found.sum(1) - expected) < 6 * np.sqrt(expected)).all()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["table", "matrix"])
def test_localized_variable_is_on_its_rank(size, kind):
    def look(comm):
        if kind == "table":
            variable = de.DynamicVariable(1, mode="localized:1")
        else:
            variable = de.Variable(tf.ones([7, 2]), mode="localized:1")
            assert variable.shape[0] == (7 if comm.rank == 1 else 0)
            rows = ownership.global_rows(variable)
            np.testing.assert_array_equal(rows, np.arange(7 if comm.rank == 1 else 0))
            np.testing.assert_array_equal(ownership.local_rows(variable, rows), rows)
        is_owned = ownership.owned(variable, np.arange(7))
        assert (is_owned is None) == (comm.rank == 1) != ownership.is_elsewhere(variable)
        assert is_owned is None or (is_owned.shape == (7,) and not is_owned.any())
        return ownership.share_of(variable, 7)

    assert run(size, look) == [0, 7, 0][:size]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 10])
def test_matrix_rows_are_assigned_round_robin(rows):
    def look(comm):
        matrix = de.Variable(tf.zeros([rows, 2]))
        rank_rows = ownership.global_rows(matrix)
        assert matrix.shape[0] == len(rank_rows)
        np.testing.assert_array_equal(
            ownership.local_rows(matrix, rank_rows), np.arange(len(rank_rows))
        )
        np.testing.assert_array_equal(
            np.flatnonzero(ownership.owned(matrix, np.arange(rows))), rank_rows
        )
        assert ownership.share_of(matrix, rows) >= len(rank_rows)
        return rank_rows.tolist()

    assert run(3, look) == [list(range(rank, rows, 3)) for rank in range(3)]

"""The operators one by one: creation, state, empty inputs, gradients, export, counts, bad input."""

import gc

import gpu
import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from op_helpers import DIM, INITIAL, make, ops
from operator_calls import operator_calls
from operator_values import Values
from tensorflow.python.framework import op_def_registry
from valid_call import label

Full = tf.errors.ResourceExhaustedError
Invalid = tf.errors.InvalidArgumentError
Precondition = tf.errors.FailedPreconditionError


class TestCreation:
    def test_shared_name_gives_the_same_table(self):
        first = make(shared_name="creation_same")
        second = make(shared_name="creation_same")
        h.lookup(first, [1, 2, 3])
        assert h.size(second) == 3
        assert h.size(make(shared_name="creation_other")) == 0
        assert h.size(make(shared_name="creation_same", container="elsewhere")) == 0

    def test_anonymous_tables_are_distinct(self):
        first, second = make(), make()
        h.lookup(first, [1])
        assert h.size(second) == 0

    OTHERS = (
        ({"dim": 4}, "dim=3, not 4"),
        ({"dtype": tf.float16}, "dtype=float32, not float16"),
        ({"key": tf.int32}, "key_dtype=int64, not int32"),
        ({"key": tf.uint64}, "key_dtype=int64, not uint64"),
        ({"max_capacity": 100}, "max_capacity=50, not 100"),
        ({"max_capacity": 0}, "max_capacity=50, not 0"),
        ({"max_load_factor": 0.5}, r"max_load_factor=0\.8\d*, not 0\.5"),
        ({"evict_strategy": "none"}, "evict_strategy=lru, not none"),
        ({"epoch_steps": 3}, "epoch_steps=0, not 3"),
        ({"ttl": 8}, "ttl=0, not 8"),
        ({"ttl_clock": "data"}, "ttl_clock=steps, not data"),
        ({"ttl_since": "access"}, "ttl_since=update, not access"),
        ({"ttl_min_rows": 1}, "ttl_min_rows=0, not 1"),
        ({"admission": "frequency"}, "admission=all, not frequency"),
        ({"unadmitted": "skip"}, "unadmitted=zeros, not skip"),
        ({"admission_times": 2}, "admission_times=0, not 2"),
        ({"admission_probability": 0.5}, "admission_probability=1, not 0.5"),
        ({"admission_lines": 4}, "admission_lines=0, not 4"),
        ({"admission_first_line": 5}, "admission_first_line=0, not 5"),
        ({"admission_num_lines": 6}, "admission_num_lines=0, not 6"),
        ({"max_hbm_bytes": 1}, r"max_hbm_bytes=\d+, not 1"),
        ({"file_path": "rows"}, "file_path=, not rows"),
        ({"max_dram_bytes": 2**40}, f"max_dram_bytes=0, not {2**40}"),
        ({"seed": -8}, "seed=7, not -8"),
        ({"stochastic_rounding": True}, "stochastic_rounding=0, not 1"),
        ({"initial": [1.0, 2.0, 3.0]}, "length of initializers=1, not 3"),
        ({"initial": 0.25}, r"initializer_args\[0\]=0.5, not 0.25"),
        ({"random": True}, r"initializers\[0\]=constant, not uniform"),
    )

    def test_every_option_has_a_case_below(self):
        attributes = {attribute.name for attribute in op_def_registry.get("DynembTable").attr}
        attributes -= {"container", "shared_name", "init_capacity"}
        attribute_names = {
            "key": "key_dtype",
            "initial": "initializer_args",
            "random": "initializers",
        }
        options = {attribute_names.get(name, name) for other, _ in self.OTHERS for name in other}
        assert attributes == options | {"tier"}  # test_device_tables.py has a case

    @pytest.mark.parametrize(("other", "message"), OTHERS, ids=label)
    def test_shared_name_with_another_option_is_an_error(self, other, message):
        name = f"creation_{other}"
        options = {"max_capacity": 50, "init_capacity": 10, "seed": 7, "max_load_factor": 0.85}
        options |= {"dim": 3, "shared_name": name, "initial": 0.5}
        first = h.make_table(**options)
        h.lookup(first, [1, 2])
        with pytest.raises(Invalid, match=message) as caught:
            h.make_table(**(options | other))
        assert name in str(caught.value)
        assert h.size(h.make_table(**(options | {"init_capacity": 20}))) == 2

    @pytest.mark.skipif(not gpu.ON, reason="a CPU has one tier")
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"tier": "hbm"}, "tier=hybrid, not hbm"),
            ({"max_hbm_bytes": 4096}, "max_hbm_bytes=8192, not 4096"),
        ],
    )
    def test_shared_name_with_another_tier_is_an_error(self, other, message):
        options = {"tier": "hybrid", "max_hbm_bytes": 8192, "shared_name": f"tier_{other}"}
        first = h.make_table(**options)
        with pytest.raises(Invalid, match=message):
            h.make_table(**(options | other))
        assert h.size(first) == 0

    def test_memory_is_freed_with_the_handle(self):
        def resident():
            with open("/proc/self/statm") as f:
                return int(f.read().split()[1]) * 4096

        def fill():
            handle = h.make_table(256)
            for begin in range(0, 60_000, 20_000):
                h.lookup(handle, np.arange(begin, begin + 20_000))
            assert h.stats(handle)["row_bytes"] > 60e6
            return handle

        fill()  # allocates all memory that the process keeps
        gc.collect()
        before = resident()
        for _ in range(4):
            fill()
        gc.collect()
        assert resident() - before < 100e6  # four tables are 250 MB
        handle = fill()
        assert resident() - before > 40e6
        del handle


class TestState:
    def test_attach_gives_rows_their_state(self):
        handle = make()
        h.lookup(handle, [1, 2])
        ops.dynemb_attach_state(handle, optimizer="x", widths=[2, 1], inits=[0.5, 7.0])
        h.lookup(handle, [3])
        state = ops.dynemb_read_rows(handle, tf.constant([1, 2, 3, 4], tf.int64)).state
        np.testing.assert_array_equal(state, [[0.5, 0.5, 7]] * 3 + [[0, 0, 0]])

    def test_attach_keeps_the_same_state_and_resets_another(self):
        handle = make()
        one, vector = tf.constant([1], tf.int64), tf.constant([[1.0, 2, 3]])
        ops.dynemb_attach_state(handle, optimizer="x", widths=[2], inits=[0.0])
        ops.dynemb_write_rows(handle, one, vector, [[4.0, 5.0]], 1, insert=True)
        ops.dynemb_attach_state(handle, optimizer="x", widths=[2], inits=[0.0])
        np.testing.assert_array_equal(ops.dynemb_read_rows(handle, one).state, [[4, 5]])
        ops.dynemb_attach_state(handle, optimizer="y", widths=[1, 2], inits=[8.0, 9.0])
        values, state, _ = ops.dynemb_read_rows(handle, one)
        np.testing.assert_array_equal(state, [[8, 9, 9]])
        np.testing.assert_array_equal(values, vector)

    @pytest.mark.parametrize(
        ("widths", "inits"), [([0], [0.0]), ([-1], [0.0]), ([2**40], [0.0]), ([1, 2], [0.0])]
    )
    def test_bad_widths_change_nothing(self, widths, inits):
        handle = make()
        ops.dynemb_attach_state(handle, optimizer="x", widths=[2], inits=[1.5])
        h.lookup(handle, [1])
        with pytest.raises(Invalid):
            ops.dynemb_attach_state(handle, optimizer="y", widths=widths, inits=inits)
        state = ops.dynemb_read_rows(handle, tf.constant([1], tf.int64)).state
        np.testing.assert_array_equal(state, [[1.5, 1.5]])

    def test_apply_without_the_state_is_an_error(self):
        handle = make()
        h.lookup(handle, [1])
        one = tf.constant([1], tf.int64)
        with pytest.raises(Precondition, match="state"):
            h.apply_sgd([handle], [one], [np.ones([1, DIM], np.float32)], momentum=True)
        np.testing.assert_array_equal(ops.dynemb_read_rows(handle, one).values, [INITIAL])


class TestEmpty:
    """Empty inputs give empty outputs, and no table changes."""

    none = np.zeros(0, np.int64)
    vectors = np.zeros([0, DIM], np.float32)

    def test_one_table_operators(self):
        handle = make()
        for insert in (True, False):
            values, rows = h.lookup(handle, self.none, insert)
            assert values.shape == (0, DIM)
            assert rows.shape == (0,)
            assert h.lookup(handle, np.zeros([2, 0], np.int64), insert).values.shape == (2, 0, DIM)
        ops.dynemb_upsert(handle, self.none, self.vectors)
        ops.dynemb_accumulate(handle, self.none, self.vectors)
        ops.dynemb_write_rows(handle, self.none, self.vectors, np.zeros([0, 0]), 1, insert=True)
        assert int(ops.dynemb_erase(handle, self.none)) == 0
        assert ops.dynemb_contains(handle, self.none).shape == (0,)
        assert ops.dynemb_read_rows(handle, self.none).values.shape == (0, DIM)
        h.apply_sgd([handle], [self.none], [self.vectors])
        assert [part.shape[0] for part in h.export(handle)] == [0, 0, 0, 0]
        ops.dynemb_clear(handle)
        assert h.size(handle) == 0

    @pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
    @pytest.mark.parametrize("num_bags", [0, 3])
    @pytest.mark.parametrize("form", ["uniform", "splits", "indices"])
    def test_bags(self, form, num_bags, combiner):
        handle = make()
        bags = {
            "uniform": np.int64(0),
            "splits": np.zeros(num_bags + 1, np.int64),
            "indices": np.zeros([0, 2], np.int64),
        }[form]
        outputs, rows, argmax = h.lookup_sparse(
            [handle], [self.none], [bags], [num_bags], [DIM], combiners=[combiner]
        )
        np.testing.assert_array_equal(outputs[0], np.zeros([num_bags, DIM]))
        if combiner == "max":
            np.testing.assert_array_equal(argmax[0], np.full([num_bags, DIM], -1))
        keys, sums, unique_rows = ops.dynemb_lookup_sparse_grad(
            [self.none], rows, [bags], [h.NO_WEIGHTS], argmax, outputs, combiners=[combiner]
        )
        assert [keys[0].shape, sums[0].shape, unique_rows[0].shape] == [(0,), (0, DIM), (0,)]
        (grads,) = ops.dynemb_lookup_sparse_weight_grad(
            [handle], [self.none], rows, [bags], [h.NO_WEIGHTS], argmax, outputs, outputs,
            combiners=[combiner],
        )  # fmt: skip
        assert grads.shape == (0,)

    def test_dedup_sum(self):
        keys, sums = ops.dynemb_dedup_sum(self.none, self.vectors)
        assert keys.shape == (0,)
        assert sums.shape == (0, DIM)


class TestApply:
    def test_stale_rows_are_dropped_and_counted(self):
        handle = make()
        keys = np.array([1, 2, 3])
        rows = h.lookup(handle, keys).rows
        ops.dynemb_erase(handle, tf.constant([2], tf.int64))
        grads = np.ones([3, DIM], np.float32)
        h.apply_sgd([handle], [keys], [grads], [rows])
        assert h.stats(handle)["dropped_gradients"] == 1
        values, _, found = ops.dynemb_read_rows(handle, keys)
        assert found.numpy().tolist() == [True, False, True]
        np.testing.assert_array_equal(values[0], np.array(INITIAL) - 0.5)
        # Another key that got the erased row must not get the gradient either.
        taken = h.lookup(handle, [9]).rows
        assert taken.numpy()[0] == rows.numpy()[1]
        h.apply_sgd([handle], [keys[1:2]], [grads[1:2]], [rows[1:2]])
        assert h.stats(handle)["dropped_gradients"] == 2
        np.testing.assert_array_equal(h.lookup(handle, [9], False).values, [INITIAL])

    def test_gradients_of_repeated_keys_are_summed_before_the_step(self):
        handle = make()
        ops.dynemb_attach_state(handle, optimizer="adagrad", widths=[DIM], inits=[0.0])
        h.lookup(handle, [4])
        keys = np.array([4, 8, 4])
        grads = np.array([[1.0] * DIM, [1.0] * DIM, [2.0] * DIM], np.float32)
        hyper = h.HYPER.copy()
        hyper[3] = 0.0  # epsilon
        ops.dynemb_apply_gradients(
            [handle], [keys], [np.zeros(0, np.uint32)], [grads], hyper, 1,
            optimizer="adagrad", state="adagrad", inits=[0.0],
        )  # fmt: skip
        values, state, _ = ops.dynemb_read_rows(handle, keys)
        np.testing.assert_array_equal(state[0], [9.0] * DIM)  # (1 + 2)², not 1 + 4
        np.testing.assert_allclose(values[0], np.array(INITIAL) - 0.5)
        assert h.stats(handle)["dropped_gradients"] == 1  # 8 has no row
        assert h.size(handle) == 1

    def test_nonfinite_gradients_are_counted(self):
        handle = make()
        keys = np.array([1, 2, 3])
        rows = h.lookup(handle, keys).rows
        grads = np.array([[np.nan, 0, 0], [0, np.inf, 0], [1, 1, 1]], np.float32)
        h.apply_sgd([handle], [keys], [grads], [rows])
        assert h.stats(handle)["nonfinite_gradients"] == 2

    def test_one_table_twice(self):
        handle = make()
        keys = np.array([1, 2])
        rows = h.lookup(handle, keys).rows
        grads = np.ones([2, DIM], np.float32)
        h.apply_sgd([handle, handle], [keys, keys], [grads, grads], [rows, np.zeros(0, np.uint32)])
        np.testing.assert_array_equal(
            ops.dynemb_read_rows(handle, keys).values, [np.array(INITIAL) - 1] * 2
        )


class TestExport:
    def test_since_gives_rows_updated_later(self):
        handle = make()
        h.lookup(handle, [1, 2, 3, 4])
        seen = int(h.export(handle)[3].max())
        assert len(h.export(handle, since=seen)[0]) == 0
        h.lookup(handle, [1, 2], insert=False)  # reading is not an update
        h.lookup(handle, [2, 5])
        ops.dynemb_upsert(handle, tf.constant([3], tf.int64), [[9.0, 9.0, 9.0]])
        keys, _, _, updates = h.export(handle, since=seen)
        assert sorted(keys.tolist()) == [3, 5]
        assert (updates > seen).all()
        assert updates[keys.tolist().index(3)] > updates[keys.tolist().index(5)]

    def test_chunks_cover_all_rows_once_after_erase(self):
        handle = make()
        h.lookup(handle, np.arange(1000))
        ops.dynemb_erase(handle, np.arange(0, 1000, 3))
        for limit in (1, 7, 1000):
            keys = h.export(handle, limit)[0]
            assert sorted(keys.tolist()) == [k for k in range(1000) if k % 3]

    def test_cursor_after_the_end(self):
        for cursor in (2**62, 2**63 - 1):
            found = ops.dynemb_export(
                make(), cursor, 2**62, -1, key_type=tf.int64, dtype=tf.float32
            )
            assert int(found.next_cursor) == -1


def test_stats_names_and_counts():
    handle = make()
    h.lookup(handle, [1, 2, 2])
    h.lookup(handle, [2, 7], insert=False)
    ops.dynemb_erase(handle, tf.constant([1], tf.int64))
    got = h.stats(handle)
    assert set(got) == {
        "size", "slots", "index_bytes", "row_bytes", "metadata_bytes", "hits", "device_hits",
        "misses", "inserts", "evictions", "erased", "expired", "refused", "unadmitted",
        "dropped_gradients",
        "nonfinite_gradients", "device_rows", "promotions",
        "file_rows", "file_hits", "file_hits_ahead", "file_bytes", "file_row_bytes",
        "file_index_bytes", "file_buffer_bytes", "file_rows_written", "file_rows_compacted",
        "file_bytes_read", "file_bytes_written", "file_reads", "file_writes", "file_errors",
        "clock_jumps",
    }  # fmt: skip
    assert {k: got[k] for k in ("size", "hits", "misses", "inserts", "erased", "evictions")} == {
        "size": 1, "hits": 1, "misses": 4, "inserts": 2, "erased": 1, "evictions": 0,
    }  # fmt: skip
    assert 0 < got["metadata_bytes"] < got["index_bytes"] + got["row_bytes"]


@pytest.mark.parametrize(
    "insert",
    [
        lambda t, k: h.lookup(t, k),
        lambda t, k: h.lookup_sparse([t], [k], [np.int64(1)], [len(k)], [DIM]),
        lambda t, k: ops.dynemb_upsert(t, k, np.ones([len(k), DIM], np.float32)),
        lambda t, k: ops.dynemb_accumulate(t, k, np.ones([len(k), DIM], np.float32)),
        lambda t, k: ops.dynemb_write_rows(
            t, k, np.ones([len(k), DIM], np.float32), np.zeros([len(k), 0]), 1, insert=True
        ),
    ],
    ids=["lookup", "lookup_sparse", "upsert", "accumulate", "write_rows"],
)
def test_full_table_refuses_and_is_unchanged(insert):
    handle = make(
        init_capacity=10, max_capacity=10, evict_strategy="none", shared_name="full_table"
    )
    ops.dynemb_clear(handle)
    h.lookup(handle, np.arange(8))
    before = h.export(handle)
    with pytest.raises(Full, match=r"full_table.* 8 .*10"):
        insert(handle, np.array([3, 20, 21, 22]))
    for had, has in zip(before, h.export(handle), strict=True):
        np.testing.assert_array_equal(has, had)
    assert h.stats(handle)["refused"] > 0
    insert(handle, np.array([3, 20, 20, 21])[:2])  # the keys that fit are inserted
    assert h.size(handle) == 9


# The operators whose tables and inputs are on a GPU, if there is one.
ON_GPU = (
    "table", "lookup", "lookup_sparse", "upsert", "accumulate", "read_rows", "write_rows",
    "apply_gradients", "export",
)  # fmt: skip
WRONG_CALLS = [
    (call, argument, change, error)
    for call in operator_calls()
    for argument, change, error in [*call.all_wrong_shapes(), *call.wrong_values]
    if error is not None
    if not gpu.ON or (call.name in ON_GPU and not argument.startswith("handle"))
]


class TestWrongInput:
    """Eager calls skip shape inference: the kernels check the inputs and name the wrong input."""

    @pytest.mark.parametrize(("call", "argument", "change", "error"), WRONG_CALLS, ids=label)
    def test_is_named_and_changes_nothing(self, call, argument, change, error, tmp_path):
        values = Values(tmp_path)
        values.filled(values.table)
        before = h.export(values.table)
        inputs, attributes = call.arguments(values, {argument: change})
        with pytest.raises((ValueError, TypeError, Invalid, Precondition), match=error):
            call.operator(**inputs, **attributes)
        for had, has in zip(before, h.export(values.table), strict=True):
            np.testing.assert_array_equal(has, had)

    def test_handle_of_another_resource(self):
        variable = tf.Variable([1.0])
        for call in (ops.dynemb_size, ops.dynemb_clear, ops.dynemb_stats):
            with pytest.raises((Invalid, tf.errors.NotFoundError)):
                call(variable.handle)

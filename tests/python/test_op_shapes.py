"""Shape functions: known, partly known and unknown shapes; wrong shapes fail while tracing."""

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from op_helpers import ops

DIM = 4
TYPES = {"key_type": tf.int64, "dtype": tf.float32}


def trace(fn, **specs):
    """Traces `fn` with placeholders; returns its outputs' static shapes, with None for unknown."""
    signature = {
        name: tf.TensorSpec(shape, dtype, name=name) for name, (dtype, shape) in specs.items()
    }
    shapes = []

    @tf.function
    def traced(**inputs):
        result = fn(**inputs)
        if result is None or isinstance(result, tf.Operation):
            return
        for output in tf.nest.flatten(result):
            shapes.append(None if output.shape.rank is None else output.shape.as_list())

    traced.get_concrete_function(**signature)
    return shapes


def table(dim=DIM, key=tf.int64):
    """Creates a table in the graph that is being traced, so that its handle carries the dim."""
    return h.make_table(dim, key)


i64, i32, u32, f32, res = tf.int64, tf.int32, tf.uint32, tf.float32, tf.resource
UNKNOWN = None
H = (res, [])  # a table handle without shape information
K, ROWS = (i64, [5]), (u32, [5])
FOLDER = {"handle": H, "folder": (tf.string, [])}
STEPS = {"handle": H, "steps": (tf.float64, [None]), "tick": (i64, [])}
LINES = {"handle": H, "lines": (tf.uint64, [5, 8]), "first_line": (i64, [])}
NO_WEIGHTS, SPLITS, ARGMAX = (f32, [0]), (i64, [4]), (i32, [3, DIM])
GRADS = (f32, [3, DIM])


def lookup(table, keys, default=None):
    default = tf.zeros([0]) if default is None else default
    return ops.dynemb_lookup(table, keys, default, insert=True)


def counted(table, keys, counts):
    return ops.dynemb_lookup_counted(table, keys, counts, dtype=f32)


def sparse(table, keys, bags, weights, num_bags, combiner="sum", dim=DIM):
    return ops.dynemb_lookup_sparse(
        [table], [keys], [bags], [weights], [num_bags],
        dtypes=[f32], dims=[dim], combiners=[combiner], insert=True,
    )  # fmt: skip


def sparse_grad(keys, rows, bags, weights, argmax, grads, combiner="max"):
    return ops.dynemb_lookup_sparse_grad(
        [keys], [rows], [bags], [weights], [argmax], [grads], combiners=[combiner]
    )


def weight_grad(table, keys, rows, bags, weights, argmax, outputs, grads, combiner="max"):
    return ops.dynemb_lookup_sparse_weight_grad(
        [table], [keys], [rows], [bags], [weights], [argmax], [outputs], [grads],
        combiners=[combiner],
    )  # fmt: skip


def apply(table, keys, rows, grads, hyper, step):
    return ops.dynemb_apply_gradients(
        [table], [keys], [rows], [grads], hyper, step, optimizer="sgd"
    )


def attach(table):
    return ops.dynemb_attach_state(table, optimizer="x", widths=[1], inits=[0.0])


def write(table, keys, values, state, step):
    return ops.dynemb_write_rows(table, keys, values, state, step, insert=True)


def export(table, cursor, limit, since):
    return ops.dynemb_export(table, cursor, limit, since, **TYPES)


def snapshot(table, since):
    return ops.dynemb_snapshot([table], since)


def load_rows(table, **inputs):
    return ops.dynemb_load_rows(table, **inputs)


def alltoall(group, data, splits):
    return ops.dynemb_ranks_alltoall(group, data, splits, operation="a")


def allgather(group, data):
    return ops.dynemb_ranks_allgather(group, data, operation="a")


def broadcast(group, data):
    return ops.dynemb_ranks_broadcast(group, data, root=1, operation="a")


def allreduce(group, a, b):
    return ops.dynemb_ranks_allreduce(group, [a, b], operation="a")


def swap_rows(table, other, tick, utc_ns):
    return ops.dynemb_swap_rows([table], [other], tick, utc_ns)


CRC = {"data": (tf.uint8, [5]), "initial": (u32, []), "room": (i64, []), "block_bytes": (i64, [])}

# The operator, its inputs by name (type and shape), and the outputs' shapes. An input with the spec
# TABLE is a table that is created in the graph.
TABLE = "created in the graph"
RIGHT = [
    (lookup, {"table": TABLE, "keys": (i64, [2, 5])}, [[2, 5, DIM], [2, 5]]),
    (lookup, {"table": TABLE, "keys": (i64, [])}, [[DIM], []]),
    (lookup, {"table": TABLE, "keys": (i64, [None, 5])}, [[None, 5, DIM], [None, 5]]),
    (lookup, {"table": TABLE, "keys": (i64, UNKNOWN)}, [None, None]),
    (lookup, {"table": H, "keys": (i64, [None, 5])}, [[None, 5, None], [None, 5]]),
    (lookup, {"table": (res, UNKNOWN), "keys": (i64, [7])}, [[7, None], [7]]),
    (lookup, {"table": TABLE, "keys": K, "default": (f32, [DIM])}, [[5, DIM], [5]]),
    (lookup, {"table": TABLE, "keys": K, "default": (f32, [0])}, [[5, DIM], [5]]),
    (lookup, {"table": TABLE, "keys": K, "default": (f32, UNKNOWN)}, [[5, DIM], [5]]),
    (
        lambda **i: sparse(**i, num_bags=tf.constant(3, i64)),
        {"table": TABLE, "keys": K, "bags": SPLITS, "weights": (f32, [5])},
        [[3, DIM], [5], [0, DIM]],
    ),
    (
        lambda **i: sparse(**i, num_bags=tf.constant(3, i64), combiner="max"),
        {"table": H, "keys": K, "bags": (i64, []), "weights": NO_WEIGHTS},
        [[3, DIM], [5], [3, DIM]],
    ),
    (
        sparse,
        {"table": H, "keys": K, "bags": SPLITS, "weights": NO_WEIGHTS, "num_bags": (i64, [])},
        [[3, DIM], [5], [0, DIM]],
    ),
    (
        lambda **i: sparse(**i, combiner="max"),
        {"table": H, "keys": (i64, [None]), "bags": (i64, [None, 2]), "weights": (f32, [None]),
         "num_bags": (i64, [])},
        [[None, DIM], [None], [None, DIM]],
    ),
    (
        lambda **i: sparse(**i, combiner="max"),
        {name: (t, UNKNOWN) for name, t in
         (("table", res), ("keys", i64), ("bags", i64), ("weights", f32), ("num_bags", i64))},
        [[None, DIM], [None], [None, DIM]],
    ),
    (
        sparse_grad,
        {"keys": K, "rows": ROWS, "bags": SPLITS, "weights": (f32, [5]), "argmax": ARGMAX,
         "grads": GRADS},
        [[None], [None, DIM], [None]],
    ),
    (
        lambda **i: sparse_grad(**i, combiner="sum"),
        {"keys": K, "rows": ROWS, "bags": (i64, [5, 2]), "weights": NO_WEIGHTS,
         "argmax": (i32, [0, DIM]), "grads": (f32, [None, DIM])},
        [[None], [None, DIM], [None]],
    ),
    (
        sparse_grad,
        {name: (t, UNKNOWN) for name, t in
         (("keys", i64), ("rows", u32), ("bags", i64), ("weights", f32), ("argmax", i32),
          ("grads", f32))},
        [[None], [None, None], [None]],
    ),
    (
        weight_grad,
        {"table": TABLE, "keys": K, "rows": ROWS, "bags": SPLITS, "weights": (f32, [5]),
         "argmax": ARGMAX, "outputs": GRADS, "grads": GRADS},
        [[5]],
    ),
    (
        weight_grad,
        {name: (t, UNKNOWN) for name, t in
         (("table", res), ("keys", i64), ("rows", u32), ("bags", i64), ("weights", f32),
          ("argmax", i32), ("outputs", f32), ("grads", f32))},
        [[None]],
    ),
    (ops.dynemb_dedup_sum, {"keys": (i64, [2, 3]), "values": (f32, [2, 3, 6])},
     [[None], [None, 6]]),
    (ops.dynemb_dedup_sum, {"keys": (i64, UNKNOWN), "values": (f32, [None, 6])},
     [[None], [None, 6]]),
    (ops.dynemb_dedup_sum, {"keys": (i64, UNKNOWN), "values": (f32, UNKNOWN)},
     [[None], [None, None]]),
    (apply, {"table": TABLE, "keys": K, "rows": ROWS, "grads": (f32, [5, DIM]),
             "hyper": (f32, [12]), "step": (i64, [])}, []),
    (apply, {"table": TABLE, "keys": K, "rows": (u32, [0]), "grads": (f32, [None, None]),
             "hyper": (f32, [None]), "step": (i64, [])}, []),
    (apply, {name: (t, UNKNOWN) for name, t in
             (("table", res), ("keys", i64), ("rows", u32), ("grads", f32), ("hyper", f32),
              ("step", i64))}, []),
    (attach, {"table": H}, [[]]),
    (ops.dynemb_upsert, {"handle": TABLE, "keys": (i64, [2, 3]), "values": (f32, [2, 3, DIM])},
     []),
    (ops.dynemb_upsert, {"handle": H, "keys": (i64, UNKNOWN), "values": (f32, UNKNOWN)}, []),
    (ops.dynemb_accumulate, {"handle": TABLE, "keys": K, "deltas": (f32, [None, DIM])}, []),
    (ops.dynemb_read_rows, {"handle": TABLE, "keys": K}, [[5, DIM], [5, None], [5]]),
    (ops.dynemb_read_rows, {"handle": H, "keys": (i64, UNKNOWN)},
     [[None, None], [None, None], [None]]),
    (write, {"table": TABLE, "keys": K, "values": (f32, [5, DIM]), "state": (f32, [5, 0]),
             "step": (i64, [])}, []),
    (write, {"table": H, "keys": (i64, [None]), "values": (f32, UNKNOWN),
             "state": (f32, [None, None]), "step": (i64, UNKNOWN)}, []),
    (ops.dynemb_erase, {"handle": H, "keys": (i64, [2, 3])}, [[]]),
    (ops.dynemb_contains, {"handle": H, "keys": (i64, [None, 3])}, [[None, 3]]),
    (ops.dynemb_contains, {"handle": H, "keys": (i64, UNKNOWN)}, [None]),
    (ops.dynemb_size, {"handle": H}, [[]]),
    (ops.dynemb_clear, {"handle": H}, []),
    (export, {"table": TABLE, "cursor": (i64, []), "limit": (i64, []), "since": (i64, [])},
     [[None], [None, DIM], [None, None], [None], []]),
    (ops.dynemb_stats, {"handle": (res, UNKNOWN)}, [[None], [None]]),
    (snapshot, {"table": H, "since": (i64, [1])}, [[], [], []]),
    (snapshot, {"table": (res, UNKNOWN), "since": (i64, UNKNOWN)}, [[], [], []]),
    (ops.dynemb_snapshot_info, {"snapshot": H, "table": (i64, [])},
     [[], [], [], [None], [None], [None], [None], [None]]),
    (ops.dynemb_expire, {"handle": H}, [[]]),
    (ops.dynemb_flush, FOLDER, []),
    (ops.dynemb_keep_flush, FOLDER, []),
    (ops.dynemb_restore, FOLDER, [[], [None], [None]]),
    (ops.dynemb_set_data_time, {"handle": H, "time": (i64, [])}, []),
    (ops.dynemb_set_expiry_marks, {"handle": H, "marks": (i64, [None])}, []),
    (ops.dynemb_load_steps, STEPS, []),
    (ops.dynemb_snapshot_admission, {"snapshot": H, "table": (i64, [])}, [[None, 8], []]),
    (ops.dynemb_load_admission, LINES, []),
    (ops.dynemb_load_admission, {name: (spec[0], UNKNOWN) for name, spec in LINES.items()}, []),
    (counted, {"table": TABLE, "keys": K, "counts": (i32, [5])}, [[5, DIM], [5]]),
    (counted, {"table": H, "keys": (i64, UNKNOWN), "counts": (i32, [2, None])},
     [[2, None, None], [2, None]]),
    (ops.dynemb_snapshot_next, {"snapshot": H, "limit_bytes": (i64, [])},
     [[], [None, None], [None, None], [None, None], [None], [None]]),
    (ops.dynemb_snapshot_end, {"snapshot": H}, []),
    (load_rows, {"table": TABLE, "keys": K, "vectors": (f32, [5, DIM]), "state": (f32, [0, 0]),
                 "updates": ROWS, "accesses": ROWS, "base": (i64, []), "tick": (i64, [])}, []),
    (load_rows, {name: (t, UNKNOWN) for name, t in
                 (("table", res), ("keys", i64), ("vectors", f32), ("state", f32),
                  ("updates", u32), ("accesses", u32), ("base", i64), ("tick", i64))}, []),
    (swap_rows, {"table": TABLE, "other": TABLE, "tick": (i64, []), "utc_ns": (i64, [])}, []),
    (ops.dynemb_advance_clock, {"tick": (i64, []), "utc_ns": (i64, [])}, []),
    (ops.dynemb_tick_before, {"utc_ns": (i64, [])}, [[]]),
    (ops.dynemb_crc32c, CRC, [[None]]),
    (alltoall, {"group": H, "data": (f32, [5, DIM]), "splits": (i32, [3])}, [[None, DIM], [3]]),
    (alltoall, {"group": (res, UNKNOWN), "data": (f32, UNKNOWN), "splits": (i32, UNKNOWN)},
     [None, None]),
    (allgather, {"group": H, "data": (f32, [5, DIM])}, [[None, DIM]]),
    (allgather, {"group": H, "data": (f32, UNKNOWN)}, [None]),
    (broadcast, {"group": H, "data": (f32, [5, DIM])}, [[5, DIM]]),
    (allreduce, {"group": H, "a": (f32, [5, DIM]), "b": (f32, [])}, [[5, DIM], []]),
]  # fmt: skip


def traced_shapes(fn, inputs):
    created = [name for name, spec in inputs.items() if spec is TABLE]

    def call(**given):
        return fn(**{name: table() for name in created}, **given)

    return trace(call, **{name: spec for name, spec in inputs.items() if spec is not TABLE})


@pytest.mark.parametrize(("fn", "inputs", "shapes"), RIGHT)
def test_right_shapes_are_inferred(fn, inputs, shapes):
    assert traced_shapes(fn, inputs) == shapes


SPARSE = {"table": TABLE, "keys": K, "bags": SPLITS, "weights": NO_WEIGHTS, "num_bags": (i64, [])}
SPARSE_GRAD = {"keys": K, "rows": ROWS, "bags": SPLITS, "weights": NO_WEIGHTS, "argmax": ARGMAX,
               "grads": GRADS}  # fmt: skip
WEIGHT_GRAD = {"table": TABLE, "keys": K, "rows": ROWS, "bags": SPLITS, "weights": (f32, [5]),
               "argmax": ARGMAX, "outputs": GRADS, "grads": GRADS}  # fmt: skip
APPLY = {
    "table": TABLE,
    "keys": K,
    "rows": ROWS,
    "grads": (f32, [5, DIM]),
    "hyper": (f32, [12]),
    "step": (i64, []),
}
UPSERT = {"handle": TABLE, "keys": K, "values": (f32, [5, DIM])}
ACCUMULATE = {"handle": TABLE, "keys": K, "deltas": (f32, [5, DIM])}
WRITE = {"table": TABLE, "keys": K, "values": (f32, [5, DIM]), "state": (f32, [5, 2]),
         "step": (i64, [])}  # fmt: skip
EXPORT = {"table": TABLE, "cursor": (i64, []), "limit": (i64, []), "since": (i64, [])}
LOAD = {"table": TABLE, "keys": K, "vectors": (f32, [5, DIM]), "state": (f32, [0, 0]),
        "updates": ROWS, "accesses": ROWS, "base": (i64, []), "tick": (i64, [])}  # fmt: skip
LOOKUP = {"table": TABLE, "keys": K, "default": (f32, [DIM])}
ONE_KEYS = {"handle": TABLE, "keys": K}
ONE = {"handle": TABLE}
VECTOR_HANDLE = (res, [1])

# One wrong shape each, in an otherwise valid call.
WRONG = [
    (fn, right, name, spec)
    for fn, right, wrongs in [
        (lookup, LOOKUP, [("table", VECTOR_HANDLE), ("default", (f32, [DIM + 1])),
                          ("default", (f32, [])), ("default", (f32, [1, DIM]))]),
        (sparse, SPARSE, [("table", VECTOR_HANDLE), ("keys", (i64, [5, 1])), ("keys", (i64, [])),
                          ("bags", (i64, [5, 1, 1])), ("bags", (i64, [6, 2])),
                          ("bags", (i64, [0])), ("weights", (f32, [4])),
                          ("weights", (f32, [5, 1])), ("weights", (f32, [])),
                          ("num_bags", (i64, [1]))]),
        (sparse_grad, SPARSE_GRAD, [("keys", (i64, [4])), ("keys", (i64, [5, 1])),
                                    ("rows", (u32, [6])), ("bags", (i64, [5])),
                                    ("bags", (i64, [4, 2])), ("weights", (f32, [3])),
                                    ("argmax", (i32, [3, DIM + 1])), ("argmax", (i32, [0, DIM])),
                                    ("grads", (f32, [3])), ("grads", (f32, [2, DIM]))]),
        (weight_grad, WEIGHT_GRAD, [("table", VECTOR_HANDLE), ("keys", (i64, [4])),
                                    ("rows", (u32, [4])), ("bags", (i64, [5])),
                                    ("weights", (f32, [0])), ("weights", (f32, [4])),
                                    ("argmax", (i32, [2, DIM])), ("outputs", (f32, [3, 3])),
                                    ("grads", (f32, [3, DIM + 1])), ("grads", (f32, [4, DIM]))]),
        (ops.dynemb_dedup_sum, {"keys": K, "values": (f32, [5, 2])},
         [("values", (f32, [4, 2])), ("values", (f32, [5])), ("values", (f32, []))]),
        (apply, APPLY, [("table", VECTOR_HANDLE), ("keys", (i64, [4])), ("keys", (i64, [5, 1])),
                        ("rows", (u32, [4])), ("rows", (u32, [5, 1])),
                        ("grads", (f32, [5, DIM + 1])), ("grads", (f32, [4, DIM])),
                        ("grads", (f32, [5])), ("hyper", (f32, [11])), ("hyper", (f32, [])),
                        ("step", (i64, [1]))]),
        (attach, {"table": TABLE}, [("table", VECTOR_HANDLE)]),
        (ops.dynemb_upsert, UPSERT, [("handle", VECTOR_HANDLE), ("values", (f32, [5, DIM + 1])),
                                     ("values", (f32, [4, DIM])), ("values", (f32, [5]))]),
        (ops.dynemb_accumulate, ACCUMULATE,
         [("handle", VECTOR_HANDLE), ("deltas", (f32, [5, DIM + 1])), ("deltas", (f32, [4, DIM])),
          ("deltas", (f32, []))]),
        (ops.dynemb_read_rows, ONE_KEYS, [("handle", VECTOR_HANDLE), ("keys", (i64, [])),
                                          ("keys", (i64, [5, 1]))]),
        (write, WRITE, [("table", VECTOR_HANDLE), ("keys", (i64, [4])), ("keys", (i64, [5, 1])),
                        ("values", (f32, [5, DIM + 1])), ("values", (f32, [4, DIM])),
                        ("state", (f32, [4, 2])), ("state", (f32, [5])), ("step", (i64, [1]))]),
        (ops.dynemb_erase, ONE_KEYS, [("handle", VECTOR_HANDLE)]),
        (ops.dynemb_contains, ONE_KEYS, [("handle", VECTOR_HANDLE)]),
        *((op, ONE, [("handle", VECTOR_HANDLE)])
          for op in (ops.dynemb_size, ops.dynemb_clear, ops.dynemb_stats, ops.dynemb_expire)),
        (export, EXPORT, [("table", VECTOR_HANDLE), ("cursor", (i64, [1])),
                          ("limit", (i64, [2])), ("since", (i64, [0]))]),
        (snapshot, {"table": H, "since": (i64, [1])}, [("since", (i64, [])),
                                                       ("since", (i64, [1, 1]))]),
        (ops.dynemb_snapshot_info, {"snapshot": H, "table": (i64, [])},
         [("snapshot", VECTOR_HANDLE), ("table", (i64, [1]))]),
        (ops.dynemb_set_data_time, {"handle": H, "time": (i64, [])},
         [("handle", VECTOR_HANDLE), ("time", (i64, [1]))]),
        *((op, FOLDER, [("handle", VECTOR_HANDLE), ("folder", (tf.string, [1]))])
          for op in (ops.dynemb_flush, ops.dynemb_keep_flush, ops.dynemb_restore)),
        (ops.dynemb_set_expiry_marks, {"handle": H, "marks": (i64, [None])},
         [("handle", VECTOR_HANDLE), ("marks", (i64, []))]),
        (ops.dynemb_load_steps, STEPS,
         [("handle", VECTOR_HANDLE), ("steps", (tf.float64, [])), ("tick", (i64, [1]))]),
        (ops.dynemb_snapshot_admission, {"snapshot": H, "table": (i64, [])},
         [("snapshot", VECTOR_HANDLE), ("table", (i64, [1]))]),
        (ops.dynemb_load_admission, LINES,
         [("handle", VECTOR_HANDLE), ("lines", (tf.uint64, [5, 7])), ("lines", (tf.uint64, [8])),
          ("first_line", (i64, [1]))]),
        (counted, {"table": H, "keys": K, "counts": (i32, [5])},
         [("table", VECTOR_HANDLE), ("counts", (i32, [4])), ("counts", (i32, [5, 1]))]),
        (ops.dynemb_snapshot_next, {"snapshot": H, "limit_bytes": (i64, [])},
         [("snapshot", VECTOR_HANDLE), ("limit_bytes", (i64, [1]))]),
        (ops.dynemb_snapshot_end, {"snapshot": H}, [("snapshot", VECTOR_HANDLE)]),
        (load_rows, LOAD, [("table", VECTOR_HANDLE), ("keys", (i64, [4])), ("keys", (i64, [5, 1])),
                           ("vectors", (f32, [5, DIM + 1])), ("vectors", (f32, [4, DIM])),
                           ("state", (f32, [0])), ("updates", (u32, [4])),
                           ("accesses", (u32, [5, 1])), ("base", (i64, [1])),
                           ("tick", (i64, [1]))]),
        (alltoall, {"group": H, "data": (f32, [5]), "splits": (i32, [2])},
         [("group", VECTOR_HANDLE), ("data", (f32, [])), ("splits", (i32, []))]),
        (allgather, {"group": H, "data": (f32, [5])},
         [("group", VECTOR_HANDLE), ("data", (f32, []))]),
        (broadcast, {"group": H, "data": (f32, [5])}, [("group", VECTOR_HANDLE)]),
        (allreduce, {"group": H, "a": (f32, [5]), "b": (f32, [])}, [("group", VECTOR_HANDLE)]),
        (swap_rows, {"table": TABLE, "other": TABLE, "tick": (i64, []), "utc_ns": (i64, [])},
         [("table", VECTOR_HANDLE), ("other", VECTOR_HANDLE), ("tick", (i64, [1])),
          ("utc_ns", (i64, [1]))]),
        (ops.dynemb_advance_clock, {"tick": (i64, []), "utc_ns": (i64, [])},
         [("tick", (i64, [1])), ("utc_ns", (i64, [1]))]),
        (ops.dynemb_tick_before, {"utc_ns": (i64, [])}, [("utc_ns", (i64, [1]))]),
        (ops.dynemb_crc32c, CRC, [("data", (tf.uint8, [])), ("initial", (u32, [1])),
                                  ("room", (i64, [1])), ("block_bytes", (i64, [1]))]),
    ]
    for name, spec in wrongs
]  # fmt: skip
wrong_ids = [f"{getattr(fn, '__name__', '')}-{name}-{spec[1]}" for fn, _, name, spec in WRONG]


@pytest.mark.parametrize(("fn", "right", "name", "spec"), WRONG, ids=wrong_ids)
def test_wrong_shape_fails_while_tracing(fn, right, name, spec):
    with pytest.raises(ValueError, match=r"[Ss]hape|[Dd]imension|rank|[Dd]imensions"):
        traced_shapes(fn, {**right, name: spec})


@pytest.mark.parametrize(
    ("fn", "right"), {id(right): (fn, right) for fn, right, _, _ in WRONG}.values()
)
def test_call_without_the_wrong_shape_is_valid(fn, right):
    traced_shapes(fn, right)


class TestAttributes:
    def test_dim_of_table(self):
        for dim in (0, -1, -(2**40)):
            with pytest.raises(ValueError, match="dim"):
                trace(lambda dim=dim: table(dim))

    def test_dims_of_lookup_sparse(self):
        inputs = {k: v for k, v in SPARSE.items() if v is not TABLE}
        for dim in (0, -7, DIM + 1):
            with pytest.raises(ValueError, match=r"dims|[Dd]imension"):
                trace(lambda dim=dim, **i: sparse(table(), dim=dim, **i), **inputs)

    @pytest.mark.parametrize("attribute", ["dtypes", "dims", "combiners"])
    def test_lists_of_another_length(self, attribute):
        attributes = {"dtypes": [f32], "dims": [DIM], "combiners": ["sum"]}
        attributes[attribute] *= 2
        inputs = {k: v for k, v in SPARSE.items() if v is not TABLE}
        with pytest.raises((ValueError, TypeError), match=f"{attribute}|[Ll]ength|[Ee]xpected"):
            trace(
                lambda keys, bags, weights, num_bags: ops.dynemb_lookup_sparse(
                    [table()], [keys], [bags], [weights], [num_bags], insert=True, **attributes
                ),
                **inputs,
            )

    @pytest.mark.parametrize(
        ("num_bags", "bags", "error"),
        [(-3, (i64, []), "negative|-3"), (4, SPLITS, "[Dd]imension")],
    )
    def test_num_bags(self, num_bags, bags, error):
        with pytest.raises(ValueError, match=error):
            trace(
                lambda **i: sparse(table(), num_bags=tf.constant(num_bags, i64), **i),
                keys=K, bags=bags, weights=NO_WEIGHTS,
            )  # fmt: skip


def test_shapes_of_several_lookups():
    def call(keys, more):
        return ops.dynemb_lookup_sparse(
            [table(2), table(3, tf.int32)],
            [keys, more],
            [tf.constant(2, i64), tf.constant([0, 4], i64)],
            [tf.zeros([0]), tf.zeros([4])],
            [tf.constant(3, i64), tf.constant(1, i64)],
            dtypes=[f32, f32], dims=[2, 3], combiners=["sum", "max"], insert=True,
        )  # fmt: skip

    assert trace(call, keys=(i64, [6]), more=(i32, [4])) == [
        [3, 2], [1, 3], [6], [4], [0, 2], [1, 3],
    ]  # fmt: skip


def test_handle_carries_the_dim_through_functions():
    @tf.function
    def inner(handle, keys):
        values = lookup(handle, keys).values
        inner_shapes.append(values.shape.as_list())
        return values

    inner_shapes = []
    shapes = trace(lambda keys: inner(tf.identity(table()), keys), keys=K)
    assert shapes == [[5, DIM]]
    assert inner_shapes == [[5, DIM]]


def test_traced_shapes_equal_eager_shapes():
    """Shapes inferred from fully known inputs are compatible with the outputs' shapes."""
    handle = h.make_table(DIM, shared_name="shapes")
    ids, weights, splits = np.arange(5), np.ones(5, np.float32), np.array([0, 2, 2, 5])

    def everything():
        created = h.make_table(DIM, shared_name="shapes")
        first = lookup(created, tf.constant(ids))
        pooled = [
            sparse(created, tf.constant(ids), tf.constant(splits), tf.constant(weights),
                   tf.constant(3, i64), combiner)
            for combiner in ("sum", "max")
        ]  # fmt: skip
        grads = [
            sparse_grad(tf.constant(ids), p.rows[0], tf.constant(splits), tf.constant(weights),
                        p.argmax[0], p.outputs[0], c)
            for p, c in zip(pooled, ("sum", "max"), strict=True)
        ]  # fmt: skip
        more = [
            weight_grad(created, tf.constant(ids), p.rows[0], tf.constant(splits),
                        tf.constant(weights), p.argmax[0], p.outputs[0], p.outputs[0], c)
            for p, c in zip(pooled, ("sum", "max"), strict=True)
        ]  # fmt: skip
        return tf.nest.flatten([
            first, pooled, grads, more,
            ops.dynemb_dedup_sum(tf.constant(ids), tf.ones([5, 2])),
            ops.dynemb_read_rows(created, tf.constant(ids)),
            ops.dynemb_contains(created, tf.constant(ids)),
            ops.dynemb_erase(created, tf.constant([99], i64)),
            ops.dynemb_size(created),
            export(created, 0, 3, 0),
            ops.dynemb_stats(created),
        ])  # fmt: skip

    static = []

    @tf.function
    def traced():
        outputs = everything()
        static.extend(output.shape for output in outputs)
        return outputs

    graph, eager = traced(), everything()
    assert len(graph) == len(eager) == len(static)
    known = 0
    for inferred, ran, expected in zip(static, graph, eager, strict=True):
        assert ran.shape == expected.shape
        assert inferred.is_compatible_with(expected.shape)
        known += inferred.is_fully_defined()
    assert known >= len(static) // 2
    assert h.size(handle) == 5

"""The operators' calls: a valid call of every operator, and what makes it wrong.

`operator_calls` is the table. From it

- `test_op_shapes.py` infers shapes that are known, partly known and unknown, and runs the calls,
- `test_ops.py` runs the wrong calls,
- `fuzz_ops.py` runs the calls with garbage for some of the arguments.

A new operator needs a `Call` here, and in `operator_values.py` the inputs that numbers cannot fill.
"""

import gpu
import numpy as np
import op_helpers as h
import tensorflow as tf
from operator_values import BAGS, DIM, IDS, RANK, RANKS, SERVED
from valid_call import Call, Spec, f32, f64, i32, i64, scalar, table, text, u32, u64

TABLE = table("table")
KEYS, ROWS, COUNTS = Spec(i64, [IDS], "keys"), Spec(u32, [IDS], "rows"), Spec(i32, [IDS], 1)
VECTORS, POOLED = Spec(f32, [IDS, DIM], "vectors"), Spec(f32, [BAGS, DIM], "pooled")
SPLITS, WEIGHTS = Spec(i64, [BAGS + 1], "bags"), Spec(f32, [IDS], "weights")
ARGMAX, HYPER = Spec(i32, [BAGS, DIM], "argmax"), Spec(f32, [len(h.HYPER)], "hyper")
TABLE_AND_KEYS = {"handle": TABLE, "keys": KEYS}
LOOKUPS = {"keys": [KEYS], "bags": [SPLITS], "weights": [WEIGHTS]}
INT32_KEYS = ("keys", np.zeros(IDS, np.int32), "keys has dtype int32")
HYPER_SHAPES = [("hyper", [11], "hyper"), ("hyper", [], "hyper")]
WRONG_WIDTHS = [("dim", 0), ("dim", -1), ("dim", -(2**40))]


def operator_calls(tables=2):
    """Returns a call of every operator; those of the exchange are for this number of tables."""
    return [
        *calls_of_one_table(), *calls_of_lookups(), *calls_of_the_exchange(tables),
        *calls_of_dumps(), *calls_of_ranks(), *calls_of_rows_that_go(),
    ]  # fmt: skip


def calls_of_one_table():
    in_files = {"handle": table("in_files")}
    served = {"handle": table("served")}
    batch = {"cursor": scalar(), "limit": scalar(100)}
    types = {"key_type": i64, "dtype": f32}
    wrong_batch = [
        ("cursor", np.int64(-1), "cursor"), ("limit", np.int64(0), "limit"),
        ("limit", np.int64(-1), "limit"), ("key_type", i32, "key_type"),
        ("dtype", tf.float16, "dtype"),
    ]  # fmt: skip
    return [
        Call(
            "table", {}, [[]],
            {"key_dtype": i64, "dtype": f32, "dim": DIM, "init_capacity": 8, "max_capacity": 0,
             "max_load_factor": 0.85, "evict_strategy": "lru", "seed": 0, "container": "",
             "shared_name": "", "stochastic_rounding": True, "initializers": ["constant"],
             "initializer_args": [0.0, 0.0], "tier": "hybrid" if gpu.ON else "host",
             "max_hbm_bytes": gpu.HBM_BYTES if gpu.ON else 0},
            wrong_shapes=WRONG_WIDTHS,
            wrong_values=[
                ("dim", 2**40, "dim=1099511627776"), ("init_capacity", 0, "init_capacity=0"),
                ("init_capacity", 2**62, "init_capacity"), ("max_capacity", -1, "max_capacity=-1"),
                ("max_capacity", 7, "init_capacity=8"), ("max_load_factor", 0.0, "max_load_factor"),
                ("max_load_factor", float("nan"), "max_load_factor"),
                ("initializer_args", [float("nan"), 0.0], "initializer"),
                ("initializers", ["constant"] * 2, "initializers"),
                ("evict_strategy", "random", "random"),
            ],
        ),
        Call("size", {"handle": TABLE}, [[]]),
        Call("stats", {"handle": TABLE}, [[None], [None]]),
        Call(
            "upsert", {**TABLE_AND_KEYS, "values": VECTORS}, [],
            also=[({"keys": [2, 3], "values": [2, 3, DIM]}, [])],
            wrong_shapes=[("values", [IDS, DIM + 1], "values"), ("values", [5, DIM], "values"),
                          ("values", [IDS], "values")],
        ),
        Call(
            "accumulate", {**TABLE_AND_KEYS, "deltas": VECTORS}, [],
            also=[({"deltas": [None, DIM]}, [])],
            wrong_shapes=[("deltas", [IDS, DIM + 1], "deltas"), ("deltas", [5, DIM], "deltas"),
                          ("deltas", [], "deltas")],
        ),
        Call(
            "read_rows", TABLE_AND_KEYS, [[IDS, DIM], [IDS, None], [IDS]],
            unknown=[[None, None], [None, None], [None]],
            wrong_shapes=[("keys", [], "keys"), ("keys", [IDS, 1], "keys")],
        ),
        Call(
            "write_rows",
            {**TABLE_AND_KEYS, "values": VECTORS, "state": Spec(f32, [IDS, 0]), "step": scalar(1)},
            [], {"insert": True},
            also=[({"handle": [], "keys": [None], "values": None, "state": [None, None],
                    "step": None}, [])],
            wrong_shapes=[("keys", [5]), ("keys", [IDS, 1]), ("values", [IDS, DIM + 1]),
                          ("values", [5, DIM]), ("state", [5, 0], "state"), ("state", [5, 2]),
                          ("state", [IDS], "state")],
            wrong_values=[("state", np.zeros([IDS, 1], np.float32), "state")],
        ),
        Call(
            "attach_state", {"handle": TABLE}, [[]],
            {"optimizer": "x", "widths": [DIM], "inits": [0.5]},
            wrong_values=[("widths", [n], f"width {n} must") for n in (0, -1, 2**40)]
            + [("widths", [1, 2], "2 widths but 1 initial")],
        ),
        Call(
            "contains", TABLE_AND_KEYS, [[IDS]], unknown=[None],
            also=[({"keys": [None, 3]}, [[None, 3]])],
        ),
        Call(
            "export", {"handle": TABLE, **batch, "since": scalar()},
            [[None], [None, DIM], [None, None], [None], []], types,
            unknown=[[None], [None, None], [None, None], [None], []], wrong_values=wrong_batch,
        ),
        Call(
            "export_if",
            {"handle": TABLE, **batch, "ranges": Spec(i64, [7], "ranges"),
             "norms": Spec(f64, [2], "norms")},
            [[None], [None, DIM], [None, None], [None], [None], []], {**types, "keys_only": False},
            unknown=[[None], [None, None], [None, None], [None], [None], []],
            wrong_shapes=[("ranges", [], "ranges"), ("norms", [2, 1], "norms")],
            wrong_values=[*wrong_batch, ("ranges", np.full(7, -1), "negative tick")],
        ),
        # Rows in files, and tables of exported models.
        Call("flush", {**in_files, "folder": scalar("empty_folder", text)}, []),
        Call("keep_flush", {**in_files, "folder": scalar("flush", text)}, []),
        Call(
            "restore", {"handle": table("restored"), "folder": scalar("flush", text)},
            [[], [None], [None]],
        ),
        Call("read_ahead", {**in_files, "keys": KEYS}, [], also=[({"keys": [2, None]}, [])]),
        Call("served_table", {}, [[]], SERVED, wrong_shapes=WRONG_WIDTHS),
        Call(
            "open_served_table", {**served, "descriptor": scalar("descriptor", text)}, [],
            also=[({"handle": None}, []), ({"descriptor": None}, [])],
        ),
        Call(
            "apply_snapshots", {**served, "path": scalar("snapshots", text)}, [[]],
            also=[({"handle": None}, [[]]), ({"path": None}, [[]])],
        ),
        Call("served_state", served, [[]] * 4),
        Call("served_stats", served, [[3]] * 2),
        Call(
            "served_weights", served, [[2, DIM]],
            {"names": ["w"], "dtypes": [f32], "shapes": [[2, DIM]]},
            wrong_values=[
                ("names", ["v"], "has no float weight 'v' of shape"),
                ("names", ["w", "w"], "names, dtypes and shapes must have the same length"),
                ("dtypes", [tf.int32], "has no int32 weight 'w'"),
                ("shapes", [[DIM, 2]], "export the model again"),
                ("shapes", [[2, None]], "not fully defined"),
            ],
        ),
    ]  # fmt: skip


def calls_of_lookups():
    """Lookups, their gradients, and the steps of optimizers."""
    gradient = {**LOOKUPS, "rows": [ROWS], "argmax": [ARGMAX], "grads": [POOLED]}
    step = {"hyper": HYPER, "step": scalar(1)}
    sgd = {"optimizer": "sgd", "flags": []}
    gradient_shapes = [
        ("keys", [5]), ("keys", [IDS, 1]), ("rows", [5], "rows"), ("bags", [5], "bags"),
        ("bags", [5, 2]), ("weights", [3]), ("argmax", [BAGS, DIM + 1]), ("argmax", [0, DIM]),
        ("grads", [BAGS], "grads"), ("grads", [2, DIM], "bags|shape"),
    ]  # fmt: skip
    return [
        Call(
            "lookup", {**TABLE_AND_KEYS, "default_value": Spec(f32, [DIM])}, [[IDS, DIM], [IDS]],
            {"insert": True}, unknown=[None, None],
            also=[
                ({"keys": [2, 5]}, [[2, 5, DIM], [2, 5]]),
                ({"keys": []}, [[DIM], []]),
                ({"keys": [None, 5]}, [[None, 5, DIM], [None, 5]]),
                ({"keys": None}, [None, None]),
                ({"handle": [], "keys": [None, 5]}, [[None, 5, None], [None, 5]]),
                ({"handle": None, "keys": [7]}, [[7, None], [7]]),
                ({"default_value": [0]}, [[IDS, DIM], [IDS]]),
                ({"default_value": None}, [[IDS, DIM], [IDS]]),
            ],
            wrong_shapes=[("default_value", [DIM + 1], "default_value"), ("default_value", []),
                          ("default_value", [1, DIM])],
            wrong_values=[INT32_KEYS, ("default_value", np.zeros(DIM, np.float16), "half")],
        ),
        Call(
            "lookup_counted", {"handle": table("admitting"), "keys": KEYS, "counts": COUNTS},
            [[IDS, DIM], [IDS]], {"dtype": f32}, unknown=[None, None],
            also=[({"handle": [], "keys": None, "counts": [2, None]},
                   [[2, None, None], [2, None]])],
            wrong_shapes=[("counts", [5]), ("counts", [IDS, 1])],
            wrong_values=[("counts", np.zeros(IDS, np.int32), "counts")],
        ),
        Call(
            "lookup_sparse", {"handles": [TABLE], **LOOKUPS, "num_bags": [scalar(BAGS)]},
            [[BAGS, DIM], [IDS], [0, DIM]],
            {"dtypes": [f32], "dims": [DIM], "combiners": ["sum"], "insert": True},
            unknown=[[None, DIM], [None], [0, DIM]],
            also=[
                ({"combiners": ["max"]}, [[BAGS, DIM], [IDS], [BAGS, DIM]]),
                ({"num_bags": np.int64(3)}, [[3, DIM], [IDS], [0, DIM]]),
                ({"num_bags": np.int64(3), "combiners": ["max"], "handles": [],
                  "bags": np.int64(2), "weights": [0]}, [[3, DIM], [IDS], [3, DIM]]),
                ({"handles": [], "weights": [0]}, [[BAGS, DIM], [IDS], [0, DIM]]),
                ({"combiners": ["max"], "handles": [], "keys": [None], "bags": [None, 2],
                  "weights": [None]}, [[None, DIM], [None], [None, DIM]]),
                ({"combiners": ["max"], "handles": None, "keys": None, "bags": None,
                  "weights": None, "num_bags": None}, [[None, DIM], [None], [None, DIM]]),
            ],
            wrong_shapes=[
                ("keys", [IDS, 1]), ("keys", []), ("bags", [IDS, 1, 1]), ("bags", [5, 2]),
                ("bags", [0]), ("weights", [5], "weights"), ("weights", [IDS, 1]), ("weights", []),
                ("num_bags", np.int64(-3), "num_bags"), ("num_bags", np.int64(4), "bags"),
                ("dims", [0], "dim"), ("dims", [-7], "dim"), ("dims", [DIM + 1], "dim"),
                ("dims", [DIM] * 2, "dims"), ("dtypes", [f32] * 2, "dtypes"),
                ("combiners", ["sum"] * 2, "combiners"),
            ],
            wrong_values=[
                ("bags", np.array([[3]] * IDS), "bag"), ("bags", np.array([0, 1, 1, 7]), "bag"),
                ("bags", np.int64(1), "bags"),
            ],
        ),
        Call(
            "lookup_sparse_grad", gradient, [[None], [None, DIM], [None]], {"combiners": ["max"]},
            unknown=[[None], [None, None], [None]],
            also=[
                ({"combiners": ["sum"]}, [[None], [None, DIM], [None]]),
                ({"combiners": ["sum"], "bags": [IDS, 2], "weights": [0], "argmax": [0, DIM],
                  "grads": [None, DIM]}, [[None], [None, DIM], [None]]),
            ],
            wrong_shapes=gradient_shapes,
        ),
        Call(
            "lookup_sparse_weight_grad", {"handles": [TABLE], **gradient, "outputs": [POOLED]},
            [[IDS]], {"combiners": ["max"]}, unknown=[[None]],
            also=[({"combiners": ["sum"], "argmax": [0, DIM]}, [[IDS]])],
            wrong_shapes=[*gradient_shapes, ("weights", [0]), ("outputs", [BAGS, DIM - 1]),
                          ("grads", [BAGS, DIM + 1])],
        ),
        Call(
            "dedup_sum", {"keys": KEYS, "values": VECTORS}, [[None], [None, DIM]],
            unknown=[[None], [None, None]],
            also=[({"keys": [2, 3], "values": [2, 3, 6]}, [[None], [None, 6]]),
                  ({"keys": None, "values": [None, 6]}, [[None], [None, 6]])],
            wrong_shapes=[("values", [5, 2]), ("values", [IDS]), ("values", [])],
        ),
        Call(
            "apply_gradients",
            {"handles": [TABLE], "keys": [KEYS], "rows": [ROWS], "grads": [VECTORS], **step},
            [], sgd,
            also=[({"rows": [0], "grads": [None, None], "hyper": [None]}, [])],
            wrong_shapes=[
                ("keys", [5]), ("keys", [IDS, 1]), ("rows", [5], "rows"), ("rows", [IDS, 1]),
                ("grads", [IDS, DIM + 1], "grads"), ("grads", [5, DIM]), ("grads", [IDS]),
                *HYPER_SHAPES,
            ],
        ),
        Call(
            "apply_pooled_gradients", {"handles": [TABLE], **gradient, **step}, [],
            {"combiners": ["max"], **sgd},
            wrong_shapes=[*gradient_shapes, ("grads", [BAGS, DIM + 1], "argmax"), *HYPER_SHAPES,
                          ("combiners", ["max"] * 2, "entries")],
            wrong_values=[("keys", np.zeros(IDS, np.int32), "keys"),
                          ("optimizer", "adam", "state")],
        ),
    ]  # fmt: skip


def calls_of_dumps():
    snapshot = {"snapshot": Spec(tf.resource, [], "snapshot")}
    clock = {"tick": scalar(2**20), "utc_ns": scalar(2**20)}
    times = Spec(u32, [IDS], 1)
    path = scalar("index_file", text)
    return [
        Call(
            "snapshot", {"handles": [TABLE], "since": Spec(i64, [1], "since")}, [[], [], []],
            {"with_deleted": False}, any_rank=["handles"],
            wrong_shapes=[("since", []), ("since", [1, 1])],
        ),
        Call("snapshot_info", {**snapshot, "table": scalar()}, [[], [], [], *[[None]] * 5]),
        Call("snapshot_admission", {**snapshot, "table": scalar()}, [[None, 8], []]),
        Call(
            "snapshot_next", {**snapshot, "limit_bytes": scalar(99)},
            [[], *[[None, None]] * 3, [None], [None]],
        ),
        Call("snapshot_end", snapshot, []),
        Call(
            "load_rows",
            {"handle": table("loaded"), "keys": Spec(i64, [IDS], "ids"), "vectors": VECTORS,
             "state": Spec(f32, [0, 0]), "updates": times, "accesses": times, "base": scalar(),
             "tick": scalar(-1)},
            [],
            wrong_shapes=[
                ("keys", [5]), ("keys", [IDS, 1]), ("vectors", [IDS, DIM + 1]),
                ("vectors", [5, DIM]), ("state", [0], None), ("updates", [5]),
                ("accesses", [IDS, 1]),
            ],
        ),
        Call(
            "set_expiry_marks", {"handle": TABLE, "marks": Spec(i64, [None], "marks")}, [],
            wrong_shapes=[("marks", [], None)],
        ),
        Call(
            "load_steps",
            {"handle": table("behind"), "steps": Spec(f64, [None], "steps"), "tick": scalar()}, [],
            wrong_shapes=[("steps", [])],
        ),
        Call("swap_rows", {"handles": [table("empty")], "others": [table("loaded")], **clock}, []),
        Call("advance_clock", clock, []),
        Call("tick_before", {"utc_ns": scalar(1)}, [[]]),
        Call(
            "crc32c",
            {"data": Spec(tf.uint8, [IDS]), "initial": scalar(0, u32), "room": scalar(1),
             "block_bytes": scalar(1)},
            [[None]], wrong_shapes=[("data", [], None)],
        ),
        Call(
            "build_key_index",
            {"keys_path": path, "keys_offset": scalar(), "num_keys": scalar(1),
             "key_bytes": scalar(8), "index_path": path, "index_offset": scalar(32),
             "log_slots": scalar(1)},
            [[]],
        ),
    ]  # fmt: skip


def calls_of_ranks():
    group = {"group": Spec(tf.resource, [], "group")}
    timeout, operation = scalar(5.0, f64), {"operation": "call"}
    return [
        Call(
            "ranks_listen",
            {"host": scalar("host", text), "rank": scalar(0, i32), "size": scalar(1, i32),
             "timeout": timeout, "tls": Spec(text, [None], "no_tls")},
            [[], [None]], wrong_shapes=[("tls", [])],
            wrong_values=[("tls", np.array(["a"]), "tls must be empty, or a library"),
                          ("tls", np.array(["", "/no", "/no", "/no"]), "'/no' cannot be used")],
        ),
        Call(
            "ranks_connect",
            {"group": Spec(tf.resource, [], "new_group"),
             "addresses": Spec(text, [None], "addresses"), "hosts": Spec(text, [None], "hosts")},
            [], wrong_shapes=[("addresses", []), ("hosts", [])],
        ),
        Call(
            "ranks_join_mpi", {"library": scalar("no_library", text), "timeout": timeout},
            [[]] * 4, error="no_such_library",
        ),
        Call(
            "ranks_use_nccl",
            {**group, "library": scalar("no_library", text), "device": scalar("device", text)},
            [[]] * 2, error="no_such_library",
        ),
        Call(
            "ranks_alltoall", {**group, "data": VECTORS, "splits": Spec(i32, [1], IDS)},
            [[None, DIM], [1]], operation, unknown=[None, None],
            also=[({"splits": [None]}, [[None, DIM], [None]])],
            wrong_shapes=[("data", []), ("splits", [])],
        ),
        Call(
            "ranks_allgather", {**group, "data": VECTORS}, [[None, DIM]], operation,
            unknown=[None], also=[({"data": None}, [None])], wrong_shapes=[("data", [])],
        ),
        Call(
            "ranks_broadcast", {**group, "data": VECTORS}, [[IDS, DIM]], {**operation, "root": 0},
            unknown=[None],
        ),
        Call(
            "ranks_allreduce", {**group, "data": [VECTORS, POOLED]}, [[IDS, DIM], [BAGS, DIM]],
            operation, unknown=[None, None], also=[({"data": []}, [[], [BAGS, DIM]])],
        ),
        Call("ranks_leave", {"group": Spec(tf.resource, [], "left_group")}, []),
    ]  # fmt: skip


def calls_of_the_exchange(t):
    """Calls with t tables that have the same keys and requests."""
    words, counts = Spec(i32, [None], "words"), Spec(i64, [t, RANKS], "row_counts")
    held = [Spec(f32, [None, DIM], "held")] * t
    owned_keys, owned_rows = Spec(i64, [None], "owned_keys"), Spec(u32, [None], "owned_rows")
    features = {
        "index": [Spec(u32, [IDS], "index")] * t, "bags": [SPLITS] * t, "weights": [WEIGHTS] * t,
    }  # fmt: skip
    forward = {"argmax": [ARGMAX] * t, "grads": [POOLED] * t}
    names, tables = {"names": ["calls"] * t}, {"tables": [*range(t)]}
    side = {"wire": ["same"] * t, "rank": RANK}
    feature_shapes = [
        ("index", [IDS, 1]), ("bags", [5, 2]), ("weights", [3]), ("weights", [IDS, 1]),
        ("tables", [t] * t, "tables"),
    ]  # fmt: skip
    # Of rows that came from other ranks, beside those of this rank.
    received = {"words": words, "held": held, "received": counts, "sent": counts}
    received_shapes = [
        ("words", [1, 1], "words has shape"), ("held", [3], "held"),
        ("received", [1 + t, RANKS], "counts has shape"), ("sent", [t, 1], "sent has shape"),
    ]  # fmt: skip
    received_values = [
        ("words", lambda words: words[1:], "words has shape"),
        ("received", lambda counts: counts + [[0, 1]] * t, "words has shape"),
        ("held", lambda rows: rows[1:], r"held\[0\] has shape"),
        ("held", lambda rows: rows[:, 1:], "held|words has shape"),
        ("sent", lambda counts: counts + [[-1, 1]] * t, "sends itself|sent holds -1"),
        ("sent", lambda counts: -counts, "sent holds -"),
        ("rank", 3, "this is rank 3"),
    ]
    no_request = f"is not a request for keys of {t} tables"
    return [
        Call(
            "route", {"keys": [KEYS] * t}, [[None], [RANKS], [None], [t, RANKS], *[[IDS]] * t],
            {"N": t, **tables, "owners": [-1] * t, **names, "num_ranks": RANKS, "rank": RANK},
            unknown=[[None], [RANKS], [None], [t, RANKS], *[[None]] * t],
            wrong_shapes=[("keys", [IDS, 1]), ("names", ["calls"] * (t + 1), "names")],
            wrong_values=[
                ("tables", [t] * t, "tables must be in"), ("owners", [2] * t, "owners must be in"),
                ("num_ranks", 5000, "num_ranks is 5000"), ("rank", 2, "rank 2 of 2"),
            ],
        ),
        Call(
            "receive_keys",
            {"words": Spec(i32, [None], "request"), "splits": Spec(i32, [RANKS], "request_splits"),
             "own": Spec(i32, [None], "own_request")},
            [*[[None]] * t, [t, RANKS]], {"Tkeys": [i64] * t, "rank": RANK},
            unknown=[*[[None]] * t, [t, None]],
            wrong_shapes=[("words", []), ("splits", [1, 1]), ("own", [1, 1])],
            wrong_values=[
                ("words", lambda words: words[:-1], no_request),
                ("words", lambda words: words * 0 - 1, no_request),
                ("words", lambda words: words * 0 + (2**31 - 1), no_request),
                ("splits", lambda splits: splits - 1, no_request),
                ("splits", lambda splits: splits + tf.constant([-1, 1]), no_request),
                ("splits", lambda splits: splits[::-1], no_request),
                ("own", lambda own: own[1:], f"message of rank 0 {no_request}"),
                ("rank", 2, "rank 2 of 2"),
            ],
        ),
        Call(
            "pack_rows", {"rows": held, "counts": counts}, [[None], [RANKS]],
            {**names, "what": "other", **side}, unknown=[[None], [None]],
            wrong_shapes=[("rows", [3]), ("counts", [1 + t, RANKS], "counts has shape"),
                          ("counts", [RANKS])],
            wrong_values=[("counts", lambda counts: counts + [[0, 1]] * t, "rows has shape"),
                          ("counts", lambda counts: counts + [[-99, 99]] * t, "negative")],
        ),
        Call(
            "unpack_rows", {"words": words, "counts": counts, "own": held, "sent": counts},
            [[None, DIM]] * t, {"dims": [DIM] * t, **side},
            wrong_shapes=[("words", [1, 1]), ("counts", [RANKS]), ("own", [3]),
                          ("sent", [1 + t, RANKS], "sent has shape"), ("dims", [0] * t, "dim")],
            wrong_values=[
                ("words", lambda words: tf.concat([words, [0]], 0), "words has shape"),
                ("own", lambda own: own[:1], r"own\[0\] has shape"),
                ("sent", lambda sent: sent + [[1, -1]] * t, "sends itself .* of table 0, but"),
                ("sent", lambda sent: sent - [[0, 99]] * t, "sent holds -"),
                ("sent", lambda sent: tf.concat([sent, sent], 1), "sent has shape"),
                ("rank", 2, "counts are for 2 ranks, but this is rank 2"),
            ],
        ),
        Call(
            "pool_rows",
            {"handles": [TABLE] * t, **received, **features, "num_bags": [scalar(BAGS)] * t,
             "owned_keys": [owned_keys] * t, "owned_rows": [owned_rows] * t, "asked": counts,
             "served": counts},
            [[BAGS, DIM]] * t + [[0, DIM]] * t,
            {"dtypes": [f32] * t, **tables, **names, "combiners": ["sum"] * t,
             "dynamic": [False] * t, "in_order": False, **side},
            unknown=[[None, None]] * t + [[0, None]] * t,
            also=[({"combiners": ["max"] * t}, [[BAGS, DIM]] * 2 * t),
                  ({"num_bags": np.int64(6), "bags": np.int64(1)},
                   [[6, DIM]] + [[BAGS, DIM]] * (t - 1) + [[0, DIM]] * t)],
            any_rank=["handles"],
            wrong_shapes=[
                *received_shapes, *feature_shapes, ("handles", [1], None), ("owned_keys", [], None),
                ("owned_rows", [1, 1], None), ("asked", [RANKS], None),
                ("served", [1 + t, RANKS], None),
            ],
            wrong_values=received_values,
        ),
        Call(
            "pool_rows_grad", {**features, **forward, "counts": counts},
            [[None], [RANKS], *[[None, DIM]] * t],
            {"T": t, **tables, "dims": [DIM] * t, "combiners": ["max"] * t, **names, **side},
            unknown=[[None], [None], *[[None, DIM]] * t],
            wrong_shapes=[*feature_shapes, ("argmax", [0, DIM]), ("grads", [BAGS]),
                          ("counts", [RANKS]), ("dims", [0] * t, "dim")],
            wrong_values=[("rank", 3, "this is rank 3"),
                          ("counts", lambda counts: counts[:, :0], "0 ranks")],
        ),
        Call(
            "sum_received",
            {"keys": [owned_keys] * t, "rows": [owned_rows] * t, "words": words,
             "own": [Spec(f32, [None, DIM], "own_sums")] * t, "counts": counts},
            [[None]] * t + [[None, DIM]] * t + [[None]] * t, side,
            unknown=[[None]] * t + [[None, None]] * t + [[None]] * t,
            wrong_shapes=[("keys", []), ("rows", [1, 1]), ("words", [1, 1]), ("own", [3]),
                          ("counts", [RANKS])],
            wrong_values=[
                ("keys", lambda keys: keys[1:], "keys has shape"),
                ("rows", lambda rows: rows[:1], "rows"),
                ("words", lambda words: words[:3], "words has shape"),
                ("own", lambda own: own[1:], "own has shape"),
                ("counts", lambda counts: -counts, "negative"),
                ("rank", 5, "this is rank 5"),
            ],
        ),
        Call(
            "pool_rows_weight_grad",
            {**received, **features, **forward, "outputs": [POOLED] * t}, [[IDS]] * t,
            {**tables, "combiners": ["sum"] * t, **side}, unknown=[[None]] * t,
            wrong_shapes=[*received_shapes, *feature_shapes, ("grads", [BAGS]),
                          ("outputs", [BAGS, DIM + 1])],
            wrong_values=received_values,
        ),
        Call(
            "read_again",
            {"handles": [TABLE] * t, "keys": [owned_keys] * t, "rows_before": [owned_rows] * t,
             "served": counts, "since": scalar()},
            [[None]] * t + [[None, 1]] * t + [[None, DIM]] * t + [[t, RANKS]],
            {"dtypes": [f32] * t, "insert": True},
            unknown=[[None]] * t + [[None, 1]] * t + [[None, None]] * t + [[None, None]],
            wrong_shapes=[("keys", [1, 1]), ("rows_before", [1, 1]), ("served", [RANKS])],
        ),
        Call(
            "owners", {"keys": KEYS}, [[IDS]], {"num_ranks": RANKS}, unknown=[None],
            also=[({"keys": [2, None]}, [[2, None]])],
        ),
        Call("exchange_stats", {}, [[None], [None]], {"table": "calls"}),
    ]  # fmt: skip


def calls_of_rows_that_go():
    """Scores, admission, expiry and eviction; the last calls leave few rows to a shared table."""
    return [
        Call(
            "scores", TABLE_AND_KEYS, [[IDS]], unknown=[None], wrong_values=[INT32_KEYS],
            also=[({"keys": [None, 3]}, [[None, 3]])],
        ),
        Call(
            "set_scores",
            {"handle": table("scored"), "keys": KEYS, "scores": Spec(i64, [IDS], 5)}, [],
            wrong_shapes=[("scores", [5], "scores"), ("scores", [IDS, 1], "scores")],
            wrong_values=[("scores", np.full(IDS, n), "scores has") for n in (-1, 2**32)],
        ),
        Call(
            "add_counts", {"handle": table("counted"), "keys": KEYS, "counts": COUNTS}, [],
            wrong_shapes=[("counts", [5], "counts"), ("counts", [], "counts")],
            wrong_values=[("counts", np.full(IDS, -1, np.int32), "counts has a negative number")],
        ),
        Call(
            "explain", TABLE_AND_KEYS, [[IDS]] * 8, unknown=[None] * 8, wrong_values=[INT32_KEYS],
            also=[({"keys": [None, 3]}, [[None, 3]] * 8)],
        ),
        Call("advance_epoch", {"handle": table("counted")}, []),
        Call(
            "set_data_time", {"handle": table("aging"), "time": scalar()}, [],
            wrong_values=[("time", np.int64(-1), "time=-1")],
        ),
        Call(
            "load_admission",
            {"handle": table("admitting"), "lines": Spec(u64, [2, 8]), "first_line": scalar(1)},
            [], {"merge": True},
            wrong_shapes=[("lines", [5, 7], "lines"), ("lines", [8], "lines")],
            wrong_values=[("first_line", np.int64(-1), "first_line=-1")],
        ),
        Call(
            "insert_and_evict", TABLE_AND_KEYS, [[None], [None, DIM], [None, None], [None]],
            {"dtype": f32}, unknown=[[None], [None, None], [None, None], [None]],
        ),
        Call("erase", TABLE_AND_KEYS, [[]], also=[({"keys": [2, 3]}, [[]])]),
        Call("expire", {"handle": TABLE}, [[]]),
        Call(
            "evict", {"handle": TABLE, "to_rows": scalar(2)}, [[]],
            wrong_values=[("to_rows", np.int64(-1), "to_rows=-1")],
        ),
        Call("clear", {"handle": TABLE}, []),
    ]  # fmt: skip

"""Calls every operator with malformed input. test_ops_fuzz.py runs this in a separate process.

Each call is a valid call with some arguments replaced by garbage; it must return or raise. Prints a
line of JSON per operator, with the numbers of calls and failures, and a line of internal errors.
"""

import collections
import faulthandler
import json
import os
import pathlib
import sys
import tempfile

import chain_writer
import numpy as np
import op_helpers as h
import served_helpers
import tensorflow as tf
from op_helpers import ops

faulthandler.enable()
DIM, BAGS, IDS = 4, 3, 6
HUGE = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1)
NEGATIVE = (-1, -2, -(2**31), -(2**40), -(2**63))
# Excludes legal sizes that take minutes or much memory.
CAPACITIES = (0, 1, 7, 1000, 2**40, 2**62, 2**63 - 1, *NEGATIVE)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-45, 3e38, -3e38, 2.0)
TYPES = (tf.int64, tf.int32, tf.uint64, tf.float32, tf.float16, tf.bfloat16, tf.uint32, tf.bool,
         tf.string, tf.int8, tf.float64)  # fmt: skip


FOLDER = tempfile.TemporaryDirectory()  # until the process ends
FILE = os.path.join(FOLDER.name, "file")
pathlib.Path(FILE).write_bytes(bytes(64))
FILES = {"file_path": os.path.join(FOLDER.name, "rows"), "max_dram_bytes": 100 * (12 + 4 * DIM)}
SNAPSHOTS = os.path.join(FOLDER.name, "snapshots")
FORMS = {"t": chain_writer.Form(DIM)}
chain_writer.publish(SNAPSHOTS, "base", {"t": chain_writer.Change({})}, watermark=1, forms=FORMS)
DESCRIPTOR = served_helpers.describe(FOLDER.name, SNAPSHOTS)


class Garbage:
    """Random input that fits no particular argument."""

    def __init__(self, rng):
        self.rng = rng
        self.variable = tf.Variable(tf.zeros([5, DIM]))
        initializer = tf.lookup.KeyValueTensorInitializer([1], [2])
        self.other_table = tf.lookup.StaticHashTable(initializer, 0)
        self.others = [
            self.variable.handle,
            self.other_table.resource_handle,
            h.make_table(DIM, tf.int32),
            h.make_table(DIM + 1),
            h.make_table(DIM, tf.int64, tf.float16),
            h.make_table(DIM, max_capacity=2, init_capacity=1, evict_strategy="none"),
            tf.stack([h.make_table(DIM)] * 2),
            tf.stack([self.variable.handle])[:0],
        ]
        destroyed = h.make_table(DIM, shared_name="destroyed")
        tf.raw_ops.DestroyResourceOp(resource=destroyed)
        self.others.append(destroyed)

    def pick(self, choices):
        return choices[self.rng.integers(len(choices))]

    def integer(self):
        return int(self.pick([*HUGE, *NEGATIVE, 0, 1, 2, 3, 5, int(self.rng.integers(-9, 99))]))

    def shape(self):
        rank = int(self.pick([0, 1, 1, 2, 2, 3, 5, 20]))
        most = 4 if rank < 4 else 2
        shape = [int(n) for n in self.rng.integers(0, 1 + most, rank)]
        if rank >= 2 and self.rng.random() < 0.15:  # empty, but with a huge dimension
            shape = [0, *shape[1:]]
            shape[-1] = int(self.pick([2**20 + 1, 2**31, 2**40, 2**61]))
            self.rng.shuffle(shape)
            if 0 not in shape[:2]:
                shape[0] = 0
        return shape

    def values(self, dtype, shape):
        if 0 in shape:
            return tf.zeros(shape, dtype)
        if dtype == tf.string:
            return tf.fill(shape, "x")
        if dtype == tf.bool:
            return tf.zeros(shape, tf.bool)
        if dtype.is_integer:
            low, high = dtype.min, dtype.max
            wide = self.rng.integers(low, high, shape, dtype.as_numpy_dtype, endpoint=True)
            small = self.rng.integers(0, 8, shape).astype(dtype.as_numpy_dtype)
            return tf.constant(np.where(self.rng.random(shape) < 0.5, wide, small), dtype)
        chosen = self.rng.choice(FLOATS, shape)
        return tf.cast(np.where(self.rng.random(shape) < 0.7, 1.0, chosen), dtype)

    def tensor(self):
        return self.values(self.pick(TYPES), self.shape())

    def like(self, right):
        """Returns garbage to replace `right`, often with the same type or shape."""
        if not isinstance(right, tf.Tensor):
            return self.tensor()
        if right.dtype == tf.resource:
            return self.tensor() if self.rng.random() < 0.1 else self.pick(self.others)
        how = self.rng.random()
        if how < 0.4:
            return self.values(right.dtype, right.shape.as_list())
        if how < 0.75:
            if right.shape.rank == 0 and right.dtype == tf.int64 and self.rng.random() < 0.8:
                return tf.constant(self.integer(), tf.int64)
            return self.values(right.dtype, self.shape())
        if how < 0.9:
            return self.values(self.pick(TYPES), right.shape.as_list())
        return self.tensor()

    def bags(self, right):
        n, b = IDS, BAGS
        return self.pick([
            tf.constant(self.integer(), tf.int64),
            tf.constant(self.rng.integers(-2, b + 2, [n, 2]), tf.int64),
            tf.constant(self.rng.integers(0, b, [n, 1]), tf.int64),
            tf.zeros([n, 0], tf.int64),
            tf.constant(self.rng.integers(-2, n + 2, [b + 1]), tf.int64),
            tf.constant([0, *np.sort(self.rng.integers(0, n + 1, b - 1)), n], tf.int64),
            tf.constant([0, n, 2, n], tf.int64),
            tf.constant([0, 2**62, -(2**62), n], tf.int64),
            tf.constant([-5, 0, 0, n], tf.int64),
            tf.constant([0] * b + [self.integer()], tf.int64),
            tf.constant([], tf.int64),
            self.like(right),
        ])  # fmt: skip

    def attribute(self, name, right):
        if name in ("dim", "dims"):
            value = self.pick([0, 3, DIM, DIM + 1, *NEGATIVE, 2**31, 2**40, 2**63 - 1])
            return self.pick([[], [value], [DIM, value]]) if name == "dims" else value
        if "capacity" in name:
            return int(self.pick(CAPACITIES))
        if name in ("dtype", "key_dtype", "key_type"):
            return self.pick(TYPES)
        if name in ("initializer_args", "inits"):
            n = self.rng.integers(0, 5)
            return [float(x) for x in self.rng.choice(FLOATS, n)]
        if name == "widths":
            n = self.rng.integers(0, 4)
            return [int(self.pick([0, 1, 4, 2**20 + 1, *HUGE, *NEGATIVE])) for _ in range(n)]
        if name in ("combiners", "flags", "initializers"):
            words = ["sum", "mean", "max", "sqrtn", "min", "", "normal", "uniform", "constant",
                     "truncated_normal", "momentum", "nesterov", "amsgrad", "centered"]  # fmt: skip
            return [str(w) for w in self.rng.choice(words, self.rng.integers(0, 4))]
        if name == "T":  # small: TensorFlow creates this number of outputs
            return int(self.rng.integers(0, 4))
        if name in ("tables", "owners"):
            return [self.integer() for _ in range(self.rng.integers(0, 4))]
        if name in ("wire", "names"):
            words = ["same", "int8", "float16", "bfloat16", ""]
            return [str(w) for w in self.rng.choice(words, self.rng.integers(0, 4))]
        if name in ("dtypes", "row_dtypes", "Tkeys"):
            return [self.pick(TYPES) for _ in range(self.rng.integers(0, 3))]
        if isinstance(right, bool):
            return self.pick([not right, not right, 7, None])
        if isinstance(right, float):
            return self.pick(FLOATS)
        if isinstance(right, int):
            return self.integer()
        words = ("", "sgd", "adam", "rowwise_adagrad", "ftrl", "x" * 1000, "none", "lru", None)
        return self.pick(words)


def right_calls(rng, table):
    """Returns the inputs and attributes of a valid call of each operator."""
    i64, f32 = tf.int64, tf.float32
    keys = tf.constant(rng.integers(0, 50, IDS), i64)
    vectors = tf.constant(rng.normal(size=[IDS, DIM]), f32)
    rows = h.lookup(table, keys).rows
    combiner = str(rng.choice(["sum", "mean", "sqrtn", "max"]))
    bags = [
        tf.constant(IDS // BAGS, i64),
        tf.constant([0, 1, 1, IDS], i64),
        tf.constant(rng.integers(0, BAGS, [IDS, 2]), i64),
    ][rng.integers(3)]
    weights = tf.constant(rng.uniform(0.5, 2, IDS), f32)
    pooled = tf.constant(rng.normal(size=[BAGS, DIM]), f32)
    argmax = tf.constant(rng.integers(-1, IDS, [BAGS, DIM]), tf.int32)
    types = {"key_type": i64, "dtype": f32}
    handle = {"handle": table}
    lookups = {"keys": [keys], "bags": [bags], "weights": [weights]}
    return {
        "dynemb_table": ({}, {
            "key_dtype": i64, "dtype": f32, "dim": DIM, "init_capacity": 8, "max_capacity": 0,
            "max_load_factor": 0.85, "evict_strategy": "lru", "seed": 0, "container": "",
            "shared_name": "", "stochastic_rounding": True, "initializers": ["constant"],
            "initializer_args": [0.0, 0.0]}),
        "dynemb_attach_state": (handle, {"optimizer": "x", "widths": [DIM], "inits": [0.5]}),
        "dynemb_lookup": (
            {**handle, "keys": keys, "default_value": tf.zeros([DIM])}, {"insert": True}),
        "dynemb_lookup_sparse": (
            {"handles": [table], **lookups, "num_bags": [tf.constant(BAGS, i64)]},
            {"dtypes": [f32], "dims": [DIM], "combiners": [combiner], "insert": True}),
        "dynemb_lookup_sparse_grad": (
            {**lookups, "rows": [rows], "argmax": [argmax], "grads": [pooled]},
            {"combiners": [combiner]}),
        "dynemb_lookup_sparse_weight_grad": (
            {"handles": [table], **lookups, "rows": [rows], "argmax": [argmax],
             "outputs": [pooled], "grads": [pooled]}, {"combiners": [combiner]}),
        "dynemb_dedup_sum": ({"keys": keys, "values": vectors}, {}),
        "dynemb_apply_gradients": (
            {"handles": [table], "keys": [keys], "rows": [rows], "grads": [vectors],
             "hyper": tf.constant(h.HYPER), "step": tf.constant(1, i64)},
            {"optimizer": "sgd", "flags": []}),
        "dynemb_apply_pooled_gradients": (
            {"handles": [table], **lookups, "rows": [rows], "argmax": [argmax], "grads": [pooled],
             "hyper": tf.constant(h.HYPER), "step": tf.constant(1, i64)},
            {"combiners": [combiner], "optimizer": "sgd", "flags": []}),
        "dynemb_upsert": ({**handle, "keys": keys, "values": vectors}, {}),
        "dynemb_accumulate": ({**handle, "keys": keys, "deltas": vectors}, {}),
        "dynemb_read_rows": ({**handle, "keys": keys}, {}),
        "dynemb_write_rows": (
            {**handle, "keys": keys, "values": vectors, "state": tf.zeros([IDS, 0]),
             "step": tf.constant(1, i64)},
            {"insert": True}),
        "dynemb_erase": ({**handle, "keys": keys}, {}),
        "dynemb_contains": ({**handle, "keys": keys}, {}),
        "dynemb_size": (handle, {}),
        "dynemb_clear": (handle, {}),
        "dynemb_export": (
            {**handle, "cursor": tf.constant(0, i64), "limit": tf.constant(100, i64),
             "since": tf.constant(0, i64)}, types),
        "dynemb_stats": (handle, {}),
        **right_snapshot_calls(keys, vectors),
        **right_exchange_calls(rng, table, keys, bags, weights, combiner),
    }  # fmt: skip


def right_exchange_calls(rng, table, keys, bags, weights, combiner):
    """Calls on rank 0 of two, with one or two tables that have the same keys and requests."""
    i64 = tf.int64
    t = int(rng.integers(1, 3))
    wire = str(rng.choice(["same", "float16", "bfloat16", "int8"]))
    names, wires, hold = ["fuzz"] * t, [wire] * t, [False] * t
    side = {"wire": wires, "rank": 0}
    routed = ops.dynemb_route(
        keys=[keys] * t, N=t, tables=list(range(t)), owners=[-1] * t, names=names, num_ranks=2,
        rank=0,
    )  # fmt: skip
    # As if the other rank had asked for the same number of rows.
    n = int(tf.reduce_sum(routed.counts[0]))
    rows = [tf.constant(rng.normal(size=[n, DIM]), tf.float32) for _ in range(t)]
    packed = ops.dynemb_pack_rows(rows, routed.counts, names=names, what="other", **side)
    received = {
        "words": packed.words,
        "held": rows,
        "received": routed.counts,
        "sent": routed.counts,
    }
    features = {"index": routed.index, "bags": [bags] * t, "weights": [weights] * t}
    tables, combiners, dtypes = list(range(t)), [combiner] * t, [tf.float32] * t
    pooled = [tf.constant(rng.normal(size=[BAGS, DIM]), tf.float32) for _ in range(t)]
    argmax = [tf.zeros([BAGS, DIM], tf.int32)] * t
    owned = [tf.range(n, dtype=i64)] * t
    row_ids = [tf.fill([n], tf.constant(7, tf.uint32))] * t
    own = [table_rows[: int(routed.counts[0, 0])] for table_rows in rows]
    return {
        "dynemb_route": (
            {"keys": [keys] * t},
            {"N": t, "tables": tables, "owners": [-1] * t, "names": names, "num_ranks": 2,
             "rank": 0}),
        "dynemb_receive_keys": (
            {"words": routed.words, "splits": tf.constant([0, len(routed.words)]),
             "own": routed.own}, {"Tkeys": [i64] * t, "rank": 0}),
        "dynemb_pack_rows": (
            {"rows": rows, "counts": routed.counts}, {"names": names, "what": "other", **side}),
        "dynemb_unpack_rows": (
            {"words": packed.words, "counts": routed.counts, "own": rows, "sent": routed.counts},
            {"dims": [DIM] * t, **side}),
        "dynemb_pool_rows": (
            {"handles": [table] * t, **received, **features,
             "num_bags": [tf.constant(BAGS, i64)] * t, "owned_keys": owned, "owned_rows": row_ids,
             "asked": routed.counts, "served": routed.counts},
            {"dtypes": dtypes, "tables": tables, "names": names, "combiners": combiners,
             "dynamic": hold, "in_order": False, **side}),
        "dynemb_pool_rows_grad": (
            {**features, "argmax": argmax, "grads": pooled, "counts": routed.counts},
            {"T": t, "tables": tables, "dims": [DIM] * t, "combiners": combiners, "names": names,
             **side}),
        "dynemb_sum_received": (
            {"keys": owned, "rows": row_ids, "words": packed.words, "own": own,
             "counts": routed.counts}, side),
        "dynemb_pool_rows_weight_grad": (
            {**received, **features, "argmax": argmax, "outputs": pooled, "grads": pooled},
            {"tables": tables, "combiners": combiners, **side}),
        "dynemb_owners": ({"keys": keys}, {"num_ranks": 2}),
        "dynemb_exchange_stats": ({}, {"table": "fuzz"}),
        "dynemb_read_again": (
            {"handles": [table] * t, "keys": owned, "rows_before": row_ids,
             "served": routed.counts, "since": tf.constant(0, i64)},
            {"dtypes": dtypes, "insert": True}),
        "dynemb_insert_and_evict": ({"handle": table, "keys": keys}, {"dtype": tf.float32}),
    }  # fmt: skip


def right_served_calls():
    """Calls on a table of an exported model."""
    attributes = {
        "table": "t", "key_dtype": tf.int64, "dtype": tf.float32, "dim": DIM, "seed": 0,
        "initializers": ["constant"], "initializer_args": [0.0, 0.0], "default_vector": [],
        "absent": "initial", "resource_name": "",
    }  # fmt: skip
    served = ops.dynemb_served_table(**attributes)
    ops.dynemb_open_served_table(served, DESCRIPTOR)
    return {
        "dynemb_served_table": ({}, attributes),
        "dynemb_open_served_table": (
            {"handle": served, "descriptor": tf.constant(DESCRIPTOR)}, {}),
        "dynemb_apply_snapshots": ({"handle": served, "path": tf.constant(SNAPSHOTS)}, {}),
        "dynemb_served_state": ({"handle": served}, {}),
    }  # fmt: skip


def right_snapshot_calls(keys, vectors):
    i64 = tf.int64
    table, other = h.make_table(DIM), h.make_table(DIM)
    ops.dynemb_upsert(table, keys, vectors)
    running, tick, utc_ns = ops.dynemb_snapshot([table], tf.constant([-1], i64))
    idle = h.make_table(DIM)
    counting = h.make_table(
        DIM,
        tier="host",
        admission="frequency",
        admission_times=2,
        admission_lines=3,
        admission_num_lines=3,
    )
    aging = h.make_table(DIM, ttl=5, ttl_clock="data")
    behind = h.make_table(DIM, tier="host")
    ops.dynemb_attach_state(behind, optimizer="sgd catch_up", widths=[1], inits=[0.0])
    steps = tf.constant([3, 1, 0, *[0.5] * 15, 2, 0.1, 2], tf.float64)
    times = tf.ones([IDS], tf.uint32)
    zero, one = tf.constant(0, i64), tf.constant(1, i64)
    flushed = h.make_table(DIM, tier="host", **FILES)
    ops.dynemb_upsert(flushed, keys, vectors)
    folder, empty = (tempfile.mkdtemp(dir=FOLDER.name) for _ in range(2))
    ops.dynemb_flush(flushed, folder)
    unused = h.make_table(DIM, tier="host", **FILES)
    return {
        "dynemb_flush": ({"handle": flushed, "folder": tf.constant(empty)}, {}),
        "dynemb_keep_flush": ({"handle": flushed, "folder": tf.constant(folder)}, {}),
        "dynemb_read_ahead": ({"handle": flushed, "keys": keys}, {}),
        "dynemb_restore": ({"handle": unused, "folder": tf.constant(folder)}, {}),
        "dynemb_snapshot": (
            {"handles": [idle], "since": tf.constant([-1], i64)}, {"with_deleted": False}),
        "dynemb_snapshot_info": ({"snapshot": running, "table": zero}, {}),
        "dynemb_expire": ({"handle": table}, {}),
        "dynemb_set_data_time": ({"handle": aging, "time": zero}, {}),
        "dynemb_set_expiry_marks": ({"handle": table, "marks": tf.constant([3, 5, 7], i64)}, {}),
        "dynemb_load_steps": ({"handle": behind, "steps": steps, "tick": zero}, {}),
        "dynemb_snapshot_admission": ({"snapshot": running, "table": zero}, {}),
        "dynemb_load_admission": (
            {"handle": counting, "lines": tf.zeros([2, 8], tf.uint64), "first_line": one},
            {"merge": True}),
        "dynemb_lookup_counted": (
            {"handle": counting, "keys": keys, "counts": tf.ones_like(keys, tf.int32)},
            {"dtype": tf.float32}),
        "dynemb_snapshot_next": ({"snapshot": running, "limit_bytes": tf.constant(99, i64)}, {}),
        "dynemb_snapshot_end": ({"snapshot": running}, {}),
        "dynemb_load_rows": (
            {"handle": other, "keys": tf.range(IDS, dtype=i64), "vectors": vectors,
             "state": tf.zeros([0, 0]), "updates": times, "accesses": times, "base": zero,
             "tick": tf.constant(-1, i64)}, {}),
        "dynemb_swap_rows": (
            {"handles": [idle], "others": [other], "tick": tick, "utc_ns": utc_ns}, {}),
        "dynemb_advance_clock": ({"tick": one, "utc_ns": one}, {}),
        "dynemb_tick_before": ({"utc_ns": one}, {}),
        "dynemb_crc32c": (
            {"data": tf.zeros([IDS], tf.uint8), "initial": tf.constant(0, tf.uint32), "room": one,
             "block_bytes": one}, {}),
        "dynemb_build_key_index": (
            {"keys_path": tf.constant(FILE), "keys_offset": zero, "num_keys": one,
             "key_bytes": tf.constant(8, i64), "index_path": tf.constant(FILE),
             "index_offset": tf.constant(32, i64), "log_slots": one}, {}),
        **calls_of_ranks(vectors),
    }  # fmt: skip


def group_of_one_rank():
    """A group whose operations need no other rank."""
    group, addresses = ops.dynemb_ranks_listen("127.0.0.1", 0, 1, 5.0)
    ops.dynemb_ranks_connect(group, addresses)
    return group


def calls_of_ranks(vectors):
    group, fresh = group_of_one_rank(), ops.dynemb_ranks_listen("127.0.0.1", 0, 1, 5.0)
    operation = {"operation": "fuzz"}
    return {
        "dynemb_ranks_listen": (
            {"host": tf.constant("127.0.0.1"), "rank": tf.constant(0), "size": tf.constant(1),
             "timeout": tf.constant(5.0, tf.float64)}, {}),
        "dynemb_ranks_connect": ({"group": fresh[0], "addresses": fresh[1]}, {}),
        "dynemb_ranks_join_mpi": (
            {"library": tf.constant("no_such_library.so"), "timeout": tf.constant(5.0, tf.float64)},
            {}),
        "dynemb_ranks_alltoall": (
            {"group": group, "data": vectors, "splits": tf.constant([IDS])}, operation),
        "dynemb_ranks_allgather": ({"group": group, "data": vectors}, operation),
        "dynemb_ranks_broadcast": ({"group": group, "data": vectors}, operation | {"root": 0}),
        "dynemb_ranks_allreduce": ({"group": group, "data": [vectors, vectors]}, operation),
        "dynemb_ranks_leave": ({"group": group_of_one_rank()}, {}),
    }  # fmt: skip


# Without these, no call would succeed.
KEPT = ("handle", "handles", "others", "snapshot", "bags", "num_bags", "descriptor", "path")
KEPT += ("folder", "group")


def spoil(garbage, inputs, attributes):
    """Replaces one to three of the arguments, or only the contents of tensors.

    Wrong `rows` and `argmax`, which other operators produce, may give wrong results, but must not
    break memory safety.
    """
    inputs, attributes = dict(inputs), dict(attributes)
    if garbage.rng.random() < 0.3:
        for name, right in inputs.items():
            if name not in KEPT:
                inputs[name] = tf.nest.map_structure(
                    lambda t: garbage.values(t.dtype, t.shape.as_list()), right
                )
        return inputs, attributes
    names = [*inputs, *attributes]
    for name in garbage.rng.choice(names, garbage.rng.integers(1, 4)):
        if name in attributes:
            attributes[name] = garbage.attribute(name, attributes[name])
        elif isinstance(inputs[name], list):
            one = garbage.bags if name == "bags" else garbage.like
            count = garbage.pick([0, 1, 1, 1, 1, 1, 1, 2])
            right = inputs[name][0] if inputs[name] else None
            inputs[name] = [one(right) for _ in range(count)]
        else:
            inputs[name] = garbage.like(inputs[name])
    return inputs, attributes


def touch(result):
    for tensor in tf.nest.flatten(result):
        if isinstance(tensor, tf.Tensor) and tensor.dtype != tf.resource:
            tensor.numpy()


def run_in_graph(operator, inputs, attributes):
    """Calls the operator in a tf.function, and so also its shape inference."""

    @tf.function
    def traced():
        return operator(**tf.nest.map_structure(tf.identity, inputs), **attributes)

    return traced()


def main(seed, calls, graph_calls):
    rng = np.random.default_rng(seed)
    garbage, garbage_of_served = Garbage(rng), Garbage(np.random.default_rng(seed))
    # All operators of a round share a table, which each finds as the operators before left it.
    done, failed = collections.Counter(), collections.Counter()
    internal_errors = set()
    for call in range(calls + graph_calls):
        table = h.make_table(DIM, init_capacity=1, **FILES if call % 3 == 0 else {})
        if call % 3 == 0:  # most rows in files
            for first in range(0, 300, 60):
                h.lookup(table, np.arange(first, first + 60))
        served = right_served_calls()
        for name, (inputs, attributes) in {**right_calls(rng, table), **served}.items():
            spoiler = garbage_of_served if name in served else garbage
            inputs, attributes = spoil(spoiler, inputs, attributes)
            operator = getattr(ops, name)
            print(f"{name} {call}", file=sys.stderr)  # the last line names the call that crashed
            done[name] += 1
            try:
                if call < calls:
                    touch(operator(**inputs, **attributes))
                else:
                    touch(run_in_graph(operator, inputs, attributes))
            except Exception as e:
                failed[name] += 1
                if isinstance(e, tf.errors.InternalError):
                    internal_errors.add(f"{name}: {e}"[:300])
        touch(ops.dynemb_stats(table))
    for name in done:
        print(json.dumps({"op": name, "calls": done[name], "failed": failed[name]}))
    print(json.dumps({"internal_errors": sorted(internal_errors)}))


if __name__ == "__main__":
    main(*[int(a) for a in sys.argv[1:]])

"""Values of inputs with which calls of the operators succeed, for operator_calls.py."""

import functools
import os
import pathlib
import tempfile

import chain_writer
import numpy as np
import op_helpers as h
import served_helpers
import tensorflow as tf
from op_helpers import ops

DIM, BAGS, IDS = 4, 3, 6
# The ranks of an exchange, of which this process is one.
RANKS, RANK = 2, 0
SERVED = {
    "table": "t", "key_dtype": tf.int64, "dtype": tf.float32, "dim": DIM, "seed": 0,
    "initializers": ["constant"], "initializer_args": [0.0, 0.0], "default_vector": [],
    "absent": "initial", "resource_name": "",
}  # fmt: skip


class Values:
    """The values of inputs. Each is made when it is first used, and may have changed since."""

    def __init__(self, folder, seed=0, tables=2, combiner="", wire="", form="splits"):
        """Makes choices that keep a call valid; the combiner or wire "" is that of the call."""
        self.folder, self.rng, self.tables = str(folder), np.random.default_rng(seed), tables
        self.combiner, self.wire, self.form = combiner, wire, form

    def __getattr__(self, name):
        value = VALUES[name](self)
        setattr(self, name, value)
        return value

    def normal(self, *shape):
        return tf.constant(self.rng.normal(size=shape), tf.float32)

    def new_folder(self):
        return tempfile.mkdtemp(dir=self.folder)

    def table_in_files(self, **options):
        """Creates a table with 100 rows in memory, and the others in files."""
        return h.make_table(
            DIM, tier="host", file_path=os.path.join(self.folder, "rows"),
            max_dram_bytes=100 * (16 + 8 * DIM), **options,
        )  # fmt: skip

    def filled(self, table):
        ops.dynemb_upsert(table, self.keys, self.vectors)
        return table

    def bags_of(self, form):
        return {
            "uniform": IDS // BAGS,
            "splits": [0, 1, 1, IDS],
            "indices": self.rng.integers(0, BAGS, [IDS, 2]),
        }[form]


VALUES = {
    "keys": lambda v: tf.constant(v.rng.integers(0, 50, IDS), tf.int64),
    "vectors": lambda v: v.normal(IDS, DIM),
    "rows": lambda v: h.lookup(v.table, v.keys).rows,
    "bags": lambda v: tf.constant(v.bags_of(v.form), tf.int64),
    "weights": lambda v: v.rng.uniform(0.5, 2, IDS).astype(np.float32),
    "pooled": lambda v: v.normal(BAGS, DIM),
    "argmax": lambda v: tf.constant(v.rng.integers(-1, IDS, [BAGS, DIM]), tf.int32),
    "hyper": lambda _: h.HYPER,
    "ids": lambda _: np.arange(IDS),
    "since": lambda _: np.array([-1]),
    "marks": lambda _: np.array([3, 5, 7]),
    # Rows of any age, score, key and norm.
    "ranges": lambda _: np.array([0, 2**32 - 1, 0, 2**32 - 1, 0, 0, 0]),
    "norms": lambda _: np.array([-1, np.inf]),
    "host": lambda _: "127.0.0.1",
    "device": lambda _: "/device:GPU:0",
    "no_library": lambda _: "no_such_library.so",
    # Tables, and what belongs to them.
    "table": lambda _: h.make_table(DIM, init_capacity=1),
    "empty": lambda _: h.make_table(DIM),
    "loaded": lambda _: h.make_table(DIM),
    "scored": lambda _: h.make_table(DIM, evict_strategy="score"),
    "counted": lambda _: h.make_table(DIM, evict_strategy="epoch_lfu"),
    "admitting": lambda _: h.make_table(
        DIM, tier="host", admission="frequency", admission_times=2, admission_lines=3,
        admission_num_lines=3,
    ),
    "aging": lambda _: h.make_table(DIM, ttl=5, ttl_clock="data"),
    "behind": lambda _: with_steps(h.make_table(DIM, tier="host")),
    "steps": lambda _: np.array([3, 1, 0, *[0.5] * 15, 2, 0.1, 2]),
    "in_files": lambda v: v.filled(v.table_in_files()),
    "restored": lambda v: v.table_in_files(),
    "empty_folder": lambda v: v.new_folder(),
    "flush": lambda v: flushed(v.in_files, v.new_folder()),
    "snapshot": lambda v: ops.dynemb_snapshot([v.filled(h.make_table(DIM))], [-1]).snapshot,
    "index_file": lambda v: file_of_zeros(v.folder),
    "served": lambda v: opened(ops.dynemb_served_table(**SERVED), v.descriptor),
    "descriptor": lambda v: published(v.folder),
    "snapshots": lambda v: os.path.join(v.folder, "snapshots"),
    # A group of one rank, whose operations need no other.
    "no_tls": lambda _: tf.constant([], tf.string),
    "listening": lambda v: listening(v),
    "new_group": lambda v: v.listening.group,
    "addresses": lambda v: v.listening.addresses,
    "hosts": lambda _: tf.constant(["host"]),
    "group": lambda v: connected(*listening(v)),
    "left_group": lambda v: connected(*listening(v)),
    # An exchange, in which the other rank has asked for as many rows.
    "routed": lambda v: ops.dynemb_route(
        [v.keys] * v.tables, N=v.tables, tables=range(v.tables), owners=[-1] * v.tables,
        names=["calls"] * v.tables, num_ranks=RANKS, rank=RANK,
    ),
    "request": lambda v: v.routed.words,
    "request_splits": lambda v: np.array([0, len(v.request)], np.int32),
    "own_request": lambda v: v.routed.own,
    "index": lambda v: v.routed.index,
    "row_counts": lambda v: v.routed.counts,
    "num_held": lambda v: int(tf.reduce_sum(v.row_counts[0])),
    "held": lambda v: [v.normal(v.num_held, DIM) for _ in range(v.tables)],
    "words": lambda v: ops.dynemb_pack_rows(
        v.held, v.row_counts, names=["calls"] * v.tables, what="other", rank=RANK,
        wire=[v.wire or "same"] * v.tables,
    ).words,
    "owned_keys": lambda v: np.arange(v.num_held),
    "owned_rows": lambda v: np.full(v.num_held, 7, np.uint32),
    "own_sums": lambda v: [rows[: int(v.row_counts[0, RANK])] for rows in v.held],
}  # fmt: skip


def with_steps(table):
    ops.dynemb_attach_state(table, optimizer="sgd catch_up", widths=[1], inits=[0.0])
    return table


def flushed(table, folder):
    ops.dynemb_flush(table, folder)
    return folder


def opened(table, descriptor):
    ops.dynemb_open_served_table(table, descriptor)
    return table


def listening(v):
    return ops.dynemb_ranks_listen("127.0.0.1", 0, 1, 5.0, v.no_tls)


def connected(group, addresses):
    ops.dynemb_ranks_connect(group, addresses, ["host"] * len(addresses))
    return group


def file_of_zeros(folder):
    path = pathlib.Path(folder, "index")
    path.write_bytes(bytes(64))
    return str(path)


@functools.cache
def published(folder):
    """Publishes an empty table and a weight in the folder; returns the path of a descriptor."""
    snapshots = os.path.join(folder, "snapshots")
    forms, empty = {"t": chain_writer.Form(DIM)}, {"t": chain_writer.Change({})}
    dense = {"w": np.ones([2, DIM], np.float32)}
    chain_writer.publish(snapshots, "base", empty, watermark=1, forms=forms, dense=dense)
    return served_helpers.describe(folder, snapshots, dense=True)

"""Served tables of dumps, at the level of operators."""

import json
import pathlib

import op_helpers as h
import tensorflow as tf
from op_helpers import ops

import tf_dynemb as de


def describe(folder, tables, **members) -> str:
    """Writes a descriptor of the snapshots at `tables`; returns its path."""
    path = pathlib.Path(folder) / "served.json"
    members = {"tables": str(tables), **members}
    text = json.dumps({"format": "tf_dynemb.served_tables", "version": 1, **members})
    path.write_text(text)
    return str(path)


def served_table(table, name=None, **attributes):
    """Returns the handle of a served table with the attributes of a DynamicVariable."""
    has = table.attributes
    return ops.dynemb_served_table(
        table=name or table.name.removesuffix(":0"),
        key_dtype=has["key_dtype"],
        dtype=has["dtype"],
        dim=has["dim"],
        seed=has["seed"],
        initializers=has["initializers"],
        initializer_args=has["initializer_args"],
        **attributes,
    )


def opened(table, descriptor):
    """Returns the handle of a served table with the attributes of a DynamicVariable, opened."""
    handle = served_table(table)
    ops.dynemb_open_served_table(handle, descriptor)
    return handle


def open_served(tmp_path, *tables, **attributes):
    """Dumps tables, and returns the handles of served tables of that dump."""
    path = tmp_path / "tables"
    de.dump(path, list(tables))
    descriptor = describe(tmp_path, path)
    handles = [served_table(table, **attributes) for table in tables]
    for handle in handles:
        ops.dynemb_open_served_table(handle, descriptor)
    return handles


def lookup(handle, keys, dtype=tf.float32, **options):
    return h.lookup(handle, keys, dtype=dtype, insert=False, **options)[0]


def same_bits(one, other) -> bool:
    return tf.constant(one).numpy().tobytes() == tf.constant(other).numpy().tobytes()

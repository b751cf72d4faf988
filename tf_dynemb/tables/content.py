"""All rows of a table in memory, for checkpoints that consist of tensors or arrays."""

from __future__ import annotations

import base64
import io
import json
import warnings
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.tables import expiry
from tf_dynemb.tables.batches import (
    NEW_SCORES,
    NO_STATE,
    counter_lines,
    load_steps,
    slices,
    takes_counters,
    takes_scores,
    warn_of_evictions,
)
from tf_dynemb.tables.cut import Cut, Rows, from_bits
from tf_dynemb.tables.table import StateSpec, Table


class Content(NamedTuple):
    """The content of a table.

    Attributes:
        rows: all rows; `cut.Rows` has the shapes.
        info: a JSON object: dtype, state_spec, base (of the times), the tick and utc_ns of the
            moment, evict_strategy, and history, initializer (kinds, arguments and seed), ttl_clock,
            expiry_marks and steps (which older ones lack; `Table`, `CutInfo`). If the table counts
            keys for their admission: the lines of counters of all ranks, the number of the first
            line here, and the lines here, compressed.
    """

    rows: Rows
    info: str

    @property
    def dtype(self) -> str:
        """The dtype of the vectors."""
        return str(json.loads(self.info)["dtype"])


def read_content(table: Table) -> Content:
    """Reads all rows, as they are at one moment. Needs memory for all of them."""
    with Cut([table], [-1], with_deleted=False) as cut:
        _, base, spec, _, marks, steps = cut.info(0)
        blocks = [rows for _, rows in cut.blocks()]
        none = cut.no_rows(0)
        counters, first_line = cut.counters(0)
    none = none._replace(state=np.empty((0, sum(spec[1])), np.float32))
    rows = Rows(*(np.concatenate(columns) for columns in zip(none, *blocks, strict=True)))
    info = {
        "dtype": table.dtype.name,
        "state_spec": table.state_spec and spec,
        "base": base,
        "tick": cut.tick,
        "utc_ns": cut.utc_ns,
        "history": table.history,
        "initializer": _initializer(table),
        "evict_strategy": table.options.strategy,
        "ttl_clock": table.options.lifetime.clock if marks else None,
        "expiry_marks": marks,
        "steps": steps,
    }
    if len(counters):
        # In the JSON object, because a checkpoint has the same tensors with and without counters.
        packed = base64.b64encode(zlib.compress(counters.tobytes(), 1)).decode()
        info["admission"] = [counter_lines(table), first_line, packed]
    return Content(rows, json.dumps(info))


def write_content(table: Table, content: Content, adopt_state: bool) -> None:
    """Replaces all rows of a table, with their times and optimizer state.

    Args:
        table: a table of the same key type and dimension.
        content: the result of `read_content`. Vectors of another dtype are converted. State of an
            optimizer other than the table's is dropped with a warning, and the rows start with
            fresh state.
        adopt_state: whether a table that no optimizer has attached to takes over the state, for an
            optimizer that attaches later.

    Raises:
        ValueError: the dimension differs.
    """
    rows = content.rows
    info = json.loads(content.info)
    spec = info["state_spec"] and _as_spec(info["state_spec"])
    if rows.vectors.shape[1:] != (table.dimension,):
        raise ValueError(
            f"{table.name} has vectors of dimension {table.dimension}, but the checkpoint contains "
            f"vectors of {list(rows.vectors.shape[1:])} for it."
        )
    target = table.state_spec
    if target is None and adopt_state:
        target = spec
    has_state = spec is not None and target is not None and spec[:2] == target[:2]
    if spec is not None and target is not None and not has_state:
        warnings.warn(
            f"the state of {spec[0]!r} in the checkpoint is dropped: {table.name!r} is trained "
            f"with {target[0]!r}. Its rows start with fresh state.",
            stacklevel=3,
        )
    keeps_scores = takes_scores(info.get("evict_strategy"), table, "the checkpoint")
    with tf.init_scope():
        *initial, seed = info.get("initializer") or [None]
        if initial != _initializer(table)[:-1]:
            seed = None
        handle = table.make_empty(len(rows.keys), target, seed)
        if has_state:
            load_steps(handle, info.get("steps", ()), info["tick"])
        for batch in slices(table, len(rows.keys), rows.state.shape[1]):
            _ops.library().dynemb_load_rows(
                handle,
                tf.constant(rows.keys[batch], table.key_type),
                tf.cast(from_bits(rows.vectors[batch], info["dtype"]), table.dtype),
                rows.state[batch] if has_state else NO_STATE,
                rows.updates[batch],
                rows.accesses[batch] if keeps_scores else NEW_SCORES,
                info["base"],
                info["tick"] + 1,
            )
        warn_of_evictions(handle, table, "the checkpoint")
        ages = info.get("ttl_clock"), info.get("expiry_marks", ())
        expiry.take_ages(handle, table.options.lifetime, *ages, "the checkpoint")
        lines, first_line, packed = info.get("admission") or (None, 0, "")
        if takes_counters(lines, table, "the checkpoint"):
            counters = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint64)
            _ops.library().dynemb_load_admission(handle, counters.reshape(-1, 8), first_line)
        _ops.library().dynemb_swap_rows([table.handle], [handle], info["tick"], info["utc_ns"])
    table.took_over(info.get("history"), seed)
    if adopt_state:
        table.state_was_restored(target)


def to_bytes(content: Content) -> npt.NDArray[np.uint8]:
    """Returns the content as one array, uint8 [n]: the bytes of an .npz file of its arrays."""
    file = io.BytesIO()
    np.savez(file, info=np.array(content.info), **content.rows._asdict())
    return np.frombuffer(file.getvalue(), np.uint8)


def from_bytes(array: npt.NDArray[np.uint8]) -> Content:
    """The inverse of `to_bytes`."""
    with np.load(io.BytesIO(array.tobytes()), allow_pickle=False) as file:
        return Content(Rows(*(file[name] for name in Rows._fields)), str(file["info"]))


def _initializer(table: Table) -> list[Any]:
    """Returns what initial vectors depend on; the seed is the last element."""
    has = table.attributes
    return [list(has[name]) for name in ("initializers", "initializer_args")] + [has["seed"]]


def _as_spec(spec: Any) -> StateSpec:
    """Converts a spec from JSON, which has no tuples."""
    optimizer, widths, inits = spec
    return optimizer, tuple(widths), tuple(inits)

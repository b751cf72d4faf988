"""Conversion of rows between tables, arrays and the columns of snapshots."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tqdm

from tf_dynemb import _ops, communicator, storage
from tf_dynemb.format import key_index
from tf_dynemb.format.table_entry import row_columns
from tf_dynemb.format.vector_format import decode
from tf_dynemb.parallel import ownership
from tf_dynemb.tables.batches import (
    NEW_SCORES,
    NO_STATE,
    counter_lines,
    owned_rows,
    takes_counters,
    takes_scores,
)
from tf_dynemb.tables.cut import Cut, Rows, from_bits
from tf_dynemb.tables.expiry import keep_alive
from tf_dynemb.tables.table import Table

NO_CHANGE = storage.Change()
# The number of blocks that may wait for the disk.
_BLOCKS_AHEAD = 3
# The seconds after which a progress bar appears.
_PATIENCE = 3.0


def write_rows(
    part: storage.Part,
    tables: Mapping[str, Table],
    cut: Cut,
    with_state: bool,
    what: str,
    quiet: bool | None,
) -> list[storage.TableEntry]:
    """Writes the columns of a cut's tables, numbered from 0; returns the entries of the tables.

    A localized table of another rank gets no shard on this rank, if it is empty here.

    Args:
        part: the part to write to.
        tables: the tables of the cut, by their names on disk.
        cut: the cut, which must not end before this function.
        with_state: whether to write the optimizer's state too.
        what: "dump", with indexes, or "delta", with the keys that were deleted.
        quiet: as in `dump`.
    """
    infos = [cut.info(number) for number in range(len(tables))]
    writers: dict[int, dict[str, storage.ColumnWriter]] = {}
    counted: dict[int, tuple[int, int]] = {}  # the first line of admission counters; their number
    for number, (table, info) in enumerate(zip(tables.values(), infos, strict=True)):
        most, (_, widths, _), deleted = info.most_rows, info.spec, info.deleted
        if ownership.is_elsewhere(table) and not most and not len(deleted):
            continue
        known = most if what == "dump" else None  # of a delta, it is an upper bound
        writers[number] = _columns(part, number, table, sum(widths) if with_state else 0, known)
        if what == "delta":
            key_type = table.key_type.as_numpy_dtype
            _append_all(part.column(number, "deleted", key_type), deleted)
        lines, first_line = cut.counters(number)
        counted[number] = first_line, len(lines)
        if len(lines):
            _append_all(part.column(number, "admission", np.uint64, lines.shape[1:]), lines)

    # One thread reads tables while another writes files; both yield to training.
    waiting: collections.deque[concurrent.futures.Future[int]] = collections.deque()
    blocks = cut.blocks()
    with (
        concurrent.futures.ThreadPoolExecutor(1, initializer=_give_way) as reader,
        concurrent.futures.ThreadPoolExecutor(1, initializer=_give_way) as writer,
        progress(sum(info.most_rows for info in infos), what, "rows", quiet) as bar,
    ):
        block = reader.submit(next, blocks, None)
        before = None
        while (read := block.result()) is not None:
            block = reader.submit(next, blocks, None)
            number, rows = read
            if before not in (None, number):
                waiting.append(writer.submit(_flush, writers[before]))
            before = number
            waiting.append(writer.submit(_append, writers[number], rows))
            while len(waiting) > _BLOCKS_AHEAD:
                bar.update(waiting.popleft().result())
        for done in waiting:
            bar.update(done.result())
        # Syncing takes as long as the disk needs, and depends on no other work. `write_index` or
        # `with_files` closes the file of the keys.
        synced = [
            writer.submit(column.close)
            for columns in writers.values()
            for name, column in columns.items()
            if name != "keys"
        ]
        if what == "dump":
            for number in writers:
                part.write_index(number, build=build_index)
        for closed in synced:
            closed.result()

    entries = []
    for number, ((name, table), info) in enumerate(zip(tables.items(), infos, strict=True)):
        optimizer, widths, inits = info.spec
        has_state = with_state and sum(widths) > 0
        shards = []
        if number in writers:
            gone = len(info.deleted) if what == "delta" else 0
            rows_written = writers[number]["keys"].rows
            first_line, num_lines = counted[number]
            shards.append(
                storage.Shard(
                    part.rank,
                    rows_written,
                    gone,
                    info.base,
                    expiry_marks=info.expiry_marks,
                    first_admission_line=first_line,
                    admission_lines=num_lines,
                    steps=info.steps,
                )
            )
        entries.append(
            storage.TableEntry(
                name=name,
                dimension=table.dimension,
                key_type=table.key_type.name,
                dtype=table.dtype.name,
                seed=table.attributes["seed"],
                initializer=initializer_of(table),
                state=storage.StateEntry(optimizer, widths, inits) if has_state else None,
                shards=tuple(shards),
                default_vector=_default_vector(table),
                padding_id=table.padding_id,
                string_hash=table.string_hash,
                evict_strategy=table.options.strategy,
                ttl_clock=table.options.lifetime.clock if table.options.ttl else None,
                admission_lines=counter_lines(table),
                history=table.history,
            )
        )
    return entries


def initializer_of(table: Table) -> storage.InitializerEntry:
    """Returns the entry of a table's initializer."""
    has = table.attributes
    return storage.InitializerEntry(tuple(has["initializers"]), tuple(has["initializer_args"]))


def _default_vector(table: Table) -> tuple[float, ...] | None:
    """Returns what readers of the dump return for a key without a row; None: its initial vector."""
    admission = table.options.admission
    if table.default_vector is None and admission is not None and admission.unadmitted != "initial":
        return (0.0,) * table.dimension
    return table.default_vector


def load_counters(snapshot: storage.Snapshot, name: str, table: Table, handle: tf.Tensor) -> None:
    """Loads the admission counters of a snapshot's table, for the keys that this rank holds.

    Args:
        snapshot: a verified snapshot.
        name: the name of the table in the snapshot.
        table: a table with the options of the handle's table.
        handle: the handle of the table to load into.
    """
    _, entry = snapshot.manifest.table(name)
    if not takes_counters(entry.admission_lines, table, f"table {name!r} on disk"):
        return
    shards = sorted(
        (shard for shard in entry.shards if shard.admission_lines),
        key=lambda shard: shard.first_admission_line,
    )
    comm = communicator.get()
    if snapshot.manifest.world_size == comm.size and not ownership.is_elsewhere(table):
        shards = [shard for shard in shards if shard.rank == comm.rank] or shards
    load = _ops.library().dynemb_load_admission
    end = 0
    for shard in shards:
        lines = snapshot.column(name, "admission", shard.rank)
        first = shard.first_admission_line
        # The line at the boundary of two ranks is in the shards of both.
        shared = max(end - first, 0)
        if shared:
            load(handle, lines[:shared], first, merge=True)
        load(handle, lines[shared:], first + shared)
        end = max(end, first + shard.admission_lines)


def load_rows(
    snapshot: storage.Snapshot,
    name: str,
    table: Table,
    handle: tf.Tensor,
    with_state: bool,
    at_tick: int,
    quiet: bool | None = None,
    marks: Sequence[int] = (),
    change: storage.Change = NO_CHANGE,
) -> int:
    """Loads the rows of a snapshot's table that this rank owns; returns the number of batches.

    Args:
        snapshot: a verified snapshot.
        name: the name of the table in the snapshot.
        table: a table with the dtypes of the handle's table.
        handle: the handle of the table to load into.
        with_state: whether to load the state of the rows too.
        at_tick: a tick greater than every time in the snapshot; -1: the rows get the current time
            instead of the times on disk. Scores that are not times are loaded in both cases.
        quiet: as in `dump`.
        marks: the marks of the last snapshot that is loaded; see `tables.expiry.keep_alive`.
        change: what steps after the snapshot have done to the rows.
    """
    batches = 0
    _, entry = snapshot.manifest.table(name)
    rows = ownership.share_of(table, sum(shard.rows for shard in entry.shards))
    keeps_scores = takes_scores(entry.evict_strategy, table, f"table {name!r} on disk")
    if table.options.lifetime.since != "access":
        marks = ()
    with progress(rows, f"load {name}", "rows", quiet) as bar:
        for shard in entry.shards:
            read_keys = snapshot.column(name, "keys", shard.rank).__getitem__
            columns = [
                snapshot.column(name, column, shard.rank)
                for column in ("vectors", "updates", "accesses")
            ]
            state = snapshot.column(name, "state", shard.rank) if with_state else None
            for selected, keys in owned_rows(table, shard.rows, entry.state_width, read_keys):
                packed, updates, accesses = (column[selected] for column in columns)
                vectors = as_tensor(packed, entry)
                if change.log_decay:
                    vectors = tf.cast(vectors, tf.float32) * change.decay
                states = NO_STATE if state is None else state[selected]
                if entry.state is not None and state is not None and any(change.log_rates):
                    states = change.state(states, entry.state.widths, entry.steps)
                _ops.library().dynemb_load_rows(
                    handle,
                    keys,
                    tf.cast(vectors, table.dtype),
                    states,
                    updates,
                    keep_alive(accesses, marks, shard.base_tick) if keeps_scores else NEW_SCORES,
                    shard.base_tick,
                    at_tick,
                )
                batches += 1
                bar.update(len(keys))
    return batches


def as_tensor(rows: npt.NDArray[Any], entry: storage.TableEntry) -> tf.Tensor:
    """Returns stored vectors [n, width] as a tensor [n, dimension] of a dtype that holds them."""
    if entry.vector_format is None:
        return from_bits(rows, entry.dtype)
    return tf.constant(decode(rows, entry.dimension))


def erase(snapshot: storage.Snapshot, name: str, handle: tf.Tensor, key_type: tf.DType) -> int:
    """Erases the keys that a delta has deleted; returns the number of batches."""
    batches = 0
    _, entry = snapshot.manifest.table(name)
    for shard in entry.shards:
        if shard.deleted:
            keys = tf.constant(np.asarray(snapshot.column(name, "deleted", shard.rank)), key_type)
            _ops.library().dynemb_erase(handle, keys)
            batches += 1
    return batches


def checksum(
    data: bytes | npt.NDArray[np.uint8], initial: int, room: int, block_bytes: int
) -> list[int]:
    """Same as `tf_dynemb.format.crc32c.blocks`, but faster."""
    checksums = _ops.library().dynemb_crc32c(
        data, tf.constant(initial, tf.uint32), max(room, 0), block_bytes
    )
    return list(map(int, checksums.numpy()))


def build_index(
    keys_path: str,
    data_offset: int,
    rows: int,
    key_bytes: int,
    index_path: str,
    index_data_offset: int,
) -> int:
    """Same as `tf_dynemb.storage.part.build_index`, but faster."""
    log_slots = key_index.index_size(rows).bit_length() - 1
    salt = _ops.library().dynemb_build_key_index(
        keys_path, data_offset, rows, key_bytes, index_path, index_data_offset, log_slots
    )
    return int(salt.numpy())


class _Bar(tqdm.tqdm):  # type: ignore[misc]
    """A progress bar whose lock is not shared with forked processes."""

    _lock = threading.RLock()


def progress(total: int, what: str, unit: str, quiet: bool | None) -> tqdm.tqdm:
    """A progress bar for work that takes longer than a few seconds."""
    # For tqdm, None means a bar only on a terminal.
    return _Bar(total=total, desc=what, unit=unit, unit_scale=True, delay=_PATIENCE, disable=quiet)


def _columns(
    part: storage.Part, number: int, table: Table, state_width: int, rows: int | None
) -> dict[str, storage.ColumnWriter]:
    columns = row_columns(table.key_type.name, table.dtype.name, table.dimension, state_width)
    return {
        # The index needs the file of the keys.
        name: part.column(number, name, *columns[name], rows=None if name == "keys" else rows)
        for name in columns
    }


def _give_way() -> None:
    """Lowers the priority of the calling thread, unless it is low already."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # this affects only speed
        os.setpriority(os.PRIO_PROCESS, thread, max(10, os.getpriority(os.PRIO_PROCESS, thread)))


def _append_all(column: storage.ColumnWriter, rows: npt.NDArray[Any]) -> None:
    column.append(rows)
    column.flush()


def _append(columns: Mapping[str, storage.ColumnWriter], rows: Rows) -> int:
    for name, column in columns.items():
        column.append(getattr(rows, name))
    return len(rows.keys)


def _flush(columns: Mapping[str, storage.ColumnWriter]) -> int:
    for column in columns.values():
        column.flush()
    return 0

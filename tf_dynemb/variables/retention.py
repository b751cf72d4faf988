"""Which rows of a table stay: scores, eviction, and calls under HierarchicalKV's names."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.parallel import exchange, key_counts, spread_keys
from tf_dynemb.parallel.ownership import owner_of_mode
from tf_dynemb.tables import selection
from tf_dynemb.tables.table import Table
from tf_dynemb.variables.explanation import Explanation, explain


class TableRows(NamedTuple):
    """Rows of a table.

    Attributes:
        keys: [n], of the table's key type.
        vectors: [n, dimension], of the table's dtype.
        state: float32 [n, floats of state]: the optimizer's.
        scores: int64 [n]: as `scores()` returns them.
    """

    keys: tf.Tensor
    vectors: tf.Tensor
    state: tf.Tensor
    scores: tf.Tensor


class Retention(Table):
    """The methods of a `DynamicVariable` that decide which rows a full table keeps.

    Methods with keys are collective: on several ranks, all ranks call them, with any keys. Methods
    that select rows by conditions work on the rows that this rank holds.
    """

    # Methods of the variable.
    lookup: Callable[..., tf.Tensor]
    upsert: Callable[..., tf.Operation | None]
    contains: Callable[[TensorLike], tf.Tensor]
    scatter_add: Callable[[tf.IndexedSlices], Table]
    _keys_and_values: Callable[[TensorLike, TensorLike], tuple[tf.Tensor, tf.Tensor]]

    @_ops.not_converted
    def scores(self, keys: TensorLike) -> tf.Tensor:
        """Returns the scores by which a full table chooses the rows to evict.

        The score of a row depends on the table's `evict_strategy`:

        - "lru", "epoch_lru", "none": the number of the batch that last used the row. Batches are
          numbered across all tables of the process.
        - "lfu": the number of times that lookups that insert have asked for the key, at most
          2^32 - 1.
        - "epoch_lfu": epoch * 2^20 + count. The epoch is the number of the epoch in which the last
          such lookup was. The count is as above, at most 2^20 - 1. Epochs have numbers from 0 to
          4095: when the next number would be 4096, all epochs are moved down by 2048, and epochs
          below 2048 to 0.
        - "score": the score that was set; 0 for a new row.

        Reading scores is not an access.

        Args:
            keys: integers of any shape.

        Returns:
            int64 of the shape of `keys`; -1 for a key without a row.
        """
        keys = self.as_keys(keys, "keys")
        if communicator.get().size > 1:
            found = spread_keys.scores(self.spread, tf.reshape(keys, [-1]))
            return tf.reshape(found, tf.shape(keys))
        return _ops.library().dynemb_scores(self.handle, keys)

    @_ops.not_converted
    def set_scores(self, keys: TensorLike, scores: TensorLike) -> tf.Operation | None:
        """Sets the scores of the keys that have rows; if keys repeat, the last one wins.

        The table's strategy must be "score" or, to set counts, "lfu" or "epoch_lfu".

        Args:
            keys: integers of any shape.
            scores: integers in [0, 2^32), of the shape of `keys` or a scalar. An epoch must not be
                later than the table's.

        Raises:
            TypeError: the scores are not integers.
            ValueError: the strategy has no scores, the shapes differ, or a score is out of range.
            tf.errors.InvalidArgumentError: an epoch is later than the table's; or a score is out of
                range, in a `tf.function`.
        """
        keys = self.as_keys(keys, "keys")
        return self._set_scores(keys, self.as_scores(scores, keys))

    def as_scores(self, scores: TensorLike, keys: tf.Tensor) -> tf.Tensor:
        """Returns scores as an int64 tensor with the shape of the keys; raises as `set_scores`."""
        if not self._options.has_scores:
            raise ValueError(
                f"scores need evict_strategy 'score', 'lfu' or 'epoch_lfu'; {self.name!r} has "
                f"{self._options.strategy!r}, which evicts by the time of the last access."
            )
        scores = tf.convert_to_tensor(scores)
        if not scores.dtype.is_integer:
            raise TypeError(f"scores must be integers, got {scores.dtype.name}.")
        if tf.executing_eagerly():
            values = np.asarray(scores.numpy(), object)
            if values.size and not (values.min() >= 0 and values.max() < 2**32):
                raise ValueError(f"scores must be in [0, 2^32), got {values.min()} and more.")
        scores = tf.cast(scores, tf.int64)
        if scores.shape.rank == 0:
            return tf.fill(tf.shape(keys), scores)
        if not scores.shape.is_compatible_with(keys.shape):
            raise ValueError(
                f"scores must have the shape of the keys, {keys.shape}, or be one number; got "
                f"{scores.shape}."
            )
        return scores

    def _set_scores(self, keys: tf.Tensor, scores: tf.Tensor) -> tf.Operation | None:
        if communicator.get().size > 1:
            flat = tf.reshape(keys, [-1]), tf.reshape(scores, [-1])
            return spread_keys.set_scores(self.spread, *flat)
        return _ops.library().dynemb_set_scores(self.handle, keys, scores)

    def advance_epoch(self) -> tf.Operation | None:
        """Begins the next epoch of an "epoch_lru" or "epoch_lfu" table.

        On several ranks, every rank calls it: each has its own rows and epoch.

        Raises:
            ValueError: the table has another strategy.
        """
        if not self._options.has_epochs:
            raise ValueError(
                f"advance_epoch needs evict_strategy 'epoch_lru' or 'epoch_lfu'; {self.name!r} has "
                f"{self._options.strategy!r}."
            )
        return _ops.library().dynemb_advance_epoch(self.handle)

    @_ops.not_converted
    def insert_and_evict(
        self, keys: TensorLike, values: TensorLike | None = None, scores: TensorLike | None = None
    ) -> TableRows:
        """Gives unknown keys a row, and returns the rows that a full table evicted for them.

        Every key gets a row, whatever the table's `admission` says.

        Values and scores are set after that: another thread can see the rows without them.

        Args:
            keys: integers of any shape.
            values: vectors to set, of shape keys.shape + [dimension]. None: new rows get their
                initial vectors, and other rows do not change.
            scores: scores to set, as in `set_scores`. None: as after a lookup.

        Returns:
            The rows that this rank's table has evicted, in the order of the bits of their keys.

        Raises:
            ValueError, TypeError: as in `upsert` and `set_scores`.
        """
        keys = self.as_keys(keys, "keys")
        # All arguments are checked before the first row leaves.
        given = None if scores is None else self.as_scores(scores, keys)
        if values is not None:
            keys, values = self._keys_and_values(keys, values)
        owned = tf.reshape(keys, [-1])
        if communicator.get().size > 1:
            asked = exchange.request([self.spread], [owned])
            owned = asked.keys[0]
        evicted = TableRows(
            *_ops.library().dynemb_insert_and_evict(self.handle, owned, dtype=self.dtype)
        )
        if communicator.get().size > 1:
            key_counts.add_counts(asked, key_counts.count_repeats(asked, [0]))
        with tf.control_dependencies(list(evicted)):
            if values is not None:
                self.insert_or_assign(keys, values)
            if given is not None:
                self._set_scores(keys, given)
        return evicted

    def size_if(self, **conditions: Any) -> int:
        """Returns the number of rows that satisfy all conditions.

        Intervals include their beginning and exclude their end. Batches train while a call examines
        the table; a row that changes meanwhile is selected by its old or its new contents.

        Args:
            **conditions: one or several of

                - `key_from`, `key_below`: keys, as integers.
                - `score_from`, `score_below`: scores, in a table that has scores that are not times
                  (`scores` explains them).
                - `updated_since`, `updated_before`: aware datetimes, for the last update of a row:
                  its insertion, a step of an optimizer, `upsert`, ...
                - `accessed_since`, `accessed_before`: aware datetimes, for the last use of a row,
                  lookups included. In a table whose scores are times.
                - `l2_from`, `l2_below`: Euclidean norms of vectors.

                Times are known per batch: "before" can leave out the rows of batches shortly before
                the time, and "since" can include them.

        Raises:
            TypeError: a condition is unknown, or its value has the wrong type.
            ValueError: a time has no time zone or is later than now, or the table does not record
                what is needed.
            RuntimeError: the call is inside a `tf.function`.
        """
        return sum(len(columns[0]) for columns in selection.select(self, conditions, True))

    def export_if(self, **conditions: Any) -> TableRows:
        """Returns the rows that satisfy all conditions, in no particular order.

        Args:
            **conditions: as in `size_if`, like the errors.
        """
        chunks = list(selection.select(self, conditions, False))
        columns = [tf.concat(column, 0) for column in zip(*chunks, strict=True)]
        keys, vectors, state, _, scores = columns
        return TableRows(keys, vectors, state, scores)

    def erase_if(self, **conditions: Any) -> int:
        """Removes the rows that satisfy all conditions; returns their number.

        The removed keys are deletions in the next delta, as with `erase`.

        Args:
            **conditions: as in `size_if`, like the errors. At least one: `clear` removes all rows.
        """
        if all(value is None for value in conditions.values()):
            raise ValueError("erase_if needs a condition; clear() removes all rows.")
        erase = _ops.library().dynemb_erase
        return sum(
            int(erase(self.handle, columns[0]))
            for columns in selection.select(self, conditions, True)
        )

    def evict(self, to_rows: int) -> tf.Tensor:
        """Evicts the rows with the lowest scores until at most `to_rows` are left.

        Unlike a full table that makes room for a key, this compares all rows. The evicted keys are
        deletions in the next delta.

        Args:
            to_rows: the number of rows to keep, 0 or more. On several ranks, all of them call this,
                and each keeps its share.

        Returns:
            The number of rows that were evicted, an int64 scalar.
        """
        ranks = communicator.get().size if owner_of_mode(self.mode) is None else 1
        return _ops.library().dynemb_evict(self.handle, -(-tf.cast(to_rows, tf.int64) // ranks))

    def expire(self) -> tf.Tensor:
        """Removes all rows that have expired, and returns their memory.

        They are deletions in the next delta. Without this call, each batch that can insert rows
        removes some of them.

        Example:
        >>> table = DynamicVariable(2, ttl=2, name="sessions")
        >>> for step in range(3):
        ...     _ = table.lookup([step])
        >>> table.contains([0, 1, 2]).numpy().tolist(), len(table)
        ([False, True, True], 3)
        >>> int(table.expire()), len(table)
        (1, 2)

        Returns:
            The number of rows that were removed, an int64 scalar; on several ranks, of this rank's
            rows.
        """
        return _ops.library().dynemb_expire(self.handle)

    @_ops.not_converted
    def set_data_time(self, time: datetime.datetime | TensorLike) -> tf.Operation | None:
        """Sets the time of the data, by which the rows of a table with `ttl_clock="data"` age.

        Rows that are used before the first call count as used at its time. A time earlier than the
        last one changes nothing, so that batches need not be in exact order. A time that is later
        than the last one by four ttl or more can be the mistake of one event: it takes effect with
        the next call, unless that has a time as before. It is then ignored, and TensorFlow's log
        has a warning. On several ranks, every rank calls it: each has its own rows and time.

        Example:
        >>> table = DynamicVariable(2, ttl=datetime.timedelta(days=30), ttl_clock="data")
        >>> table.set_data_time(datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc))
        >>> _ = table.lookup([7])
        >>> table.set_data_time(1769817600)  # 2026-01-31, in seconds since 1970
        >>> table.contains([7]).numpy().tolist()
        [False]

        Args:
            time: if the ttl is a timedelta, an aware datetime, or the seconds since 1970 UTC, a
                number or a scalar tensor; if the ttl is an integer, an integer in the same unit.

        Raises:
            ValueError: the table has no `ttl_clock="data"`; or the time has no time zone, is
                negative, or is too large, such as milliseconds.
            TypeError: the time is not a time.
        """
        return _ops.library().dynemb_set_data_time(
            self.handle, self._options.lifetime.data_time(time)
        )

    def explain(self, keys: TensorLike) -> list[Explanation]:
        """Returns what the table knows about keys: rows, times, scores, and why they left.

        A table records which keys lose their rows from its first dump or `explain` on. It remembers
        at least a million of them, and about one for each of its rows if it has more rows.

        Example:
        >>> table = DynamicVariable(2, max_capacity=1, name="items")
        >>> _ = table.explain([]), table.lookup([1]), table.lookup([2])
        >>> [(each.key, each.has_row, each.lost_because) for each in table.explain([1, 2, 3])]
        [(1, False, 'evicted'), (2, True, None), (3, False, None)]

        Args:
            keys: integers of any shape.

        Returns:
            An `Explanation` for each key, in their order.

        Raises:
            TypeError: the keys are not integers.
            RuntimeError: the call is inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise RuntimeError("explain runs eagerly only: call it outside tf.function.")
        empty = np.size(keys) == 0
        keys = np.zeros(0, np.int64) if empty else keys
        keys = tf.reshape(self.as_keys(keys, "keys"), [-1])
        return explain(self, keys.numpy())

    def find_or_insert(self, keys: TensorLike) -> tf.Tensor:
        """Same as `lookup(keys, insert=True)`; the name in HierarchicalKV."""
        return self.lookup(keys, insert=True)

    def insert_or_assign(
        self, keys: TensorLike, values: TensorLike, scores: TensorLike | None = None
    ) -> tf.Operation | None:
        """Same as `upsert`; the name in HierarchicalKV."""
        return self.upsert(keys, values, scores=scores)

    @_ops.not_converted
    def accum_or_assign(
        self, keys: TensorLike, values_or_deltas: TensorLike, accum: TensorLike
    ) -> tf.Operation | None:
        """Adds to vectors of keys that have a row, or sets vectors of keys that have none.

        It is HierarchicalKV's function for a caller that has looked up the keys before, and knows
        which ones had a row. A key that has gained or lost its row since then is left alone.

        Args:
            keys: distinct integers of any shape.
            values_or_deltas: floating point, of shape keys.shape + [dimension].
            accum: bool of the shape of `keys`: True where the row of the key gets a delta added,
                False where the key gets a row with the value.
        """
        keys = tf.reshape(self.as_keys(keys, "keys"), [-1])
        values = tf.reshape(tf.cast(values_or_deltas, self.dtype), [-1, self._dim])
        accum = tf.reshape(tf.cast(accum, tf.bool), [-1])
        exists = self.contains(keys)
        add, new = accum & exists, ~accum & ~exists
        deltas = tf.IndexedSlices(tf.boolean_mask(values, add), tf.boolean_mask(keys, add))
        self.scatter_add(deltas)
        return self.insert_or_assign(tf.boolean_mask(keys, new), tf.boolean_mask(values, new))

    @_ops.not_converted
    def assign_rows(self, keys: TensorLike, values: TensorLike) -> tf.Operation | None:
        """Sets the vectors of the keys that have a row; `assign(keys, values)` calls it.

        Args:
            keys: integers of any shape. Keys without a row are skipped; if keys repeat, the last
                one wins.
            values: vectors, floating point, of shape keys.shape + [dimension].
        """
        keys = tf.reshape(self.as_keys(keys, "keys"), [-1])
        values = tf.reshape(tf.cast(values, self.dtype), [-1, self._dim])
        exists = self.contains(keys)
        return self.insert_or_assign(tf.boolean_mask(keys, exists), tf.boolean_mask(values, exists))

"""Selection of rows in snapshots, by conditions on keys, times, scores and norms.

`tables.selection` does the same for the rows of a table in memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.chains.conditions import (
    CONDITIONS,
    check_kind,
    given,
    integer,
    ns_of,
    number,
)
from tf_dynemb.format import key_index
from tf_dynemb.format.strategies import STRATEGIES
from tf_dynemb.format.vector_format import Vectors
from tf_dynemb.serving.keys import Keys
from tf_dynemb.storage import TableEntry

# The conditions on rows in snapshots. `sample` is a fraction of the keys, chosen by their hashes.
WORDS = (*CONDITIONS, "sample")

TIMES = ("updated_since", "updated_before", "accessed_since", "accessed_before")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
# Keys were sharded and indexed by other salts of this hash.
_SAMPLE_SALT = 0x9D39247E33776D41


class Clock:
    """The times of ticks, as far as they are known: pairs of a watermark and its time, ascending.

    Args:
        marks: pairs of a tick and nanoseconds since 1970 UTC.
    """

    MOST = 128

    def __init__(self, marks: Sequence[tuple[int, int]] = ()) -> None:
        self.marks: list[tuple[int, int]] = []
        for tick, ns in sorted((int(tick), int(ns)) for tick, ns in marks):
            self.add(tick, ns)

    def add(self, tick: int, ns: int) -> None:
        """Adds a mark, unless it is not after the last one in both numbers."""
        if self.marks and not (tick > self.marks[-1][0] and ns > self.marks[-1][1]):
            return
        self.marks.append((tick, ns))
        if len(self.marks) > self.MOST:  # older times are known less precisely
            del self.marks[1 : self.MOST // 2 : 2]

    def tick_before(self, ns: int) -> int:
        """Returns a tick that was before a moment: the last one that is known; 0 if none is."""
        place = bisect.bisect_right(self.marks, ns, key=lambda mark: mark[1])
        return self.marks[place - 1][0] if place else 0


@dataclasses.dataclass(frozen=True)
class Moment:
    """A time in a condition, or the time of the snapshot's watermark minus a duration."""

    ns: int
    is_duration: bool

    @classmethod
    def of(cls, name: str, value: Any) -> Moment:
        """Returns the moment that a condition has.

        Args:
            name: the condition.
            value: an aware datetime, a timedelta, or a text as `text_of` returns it.

        Raises:
            TypeError, ValueError: it is none of these.
        """
        if isinstance(value, str):
            found = _DURATION.fullmatch(value)
            if found:
                return cls(round(float(found[1]) * _SECONDS[found[2]] * 1e9), True)
            try:
                time = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
                return cls(ns_of(time, name), False)
            except ValueError:
                raise ValueError(
                    f"{name}={value!r} is neither a time with its zone, such as "
                    "2026-01-31T12:00:00Z, nor a duration before the snapshot, such as 30d, 12h, "
                    "45m or 10s."
                ) from None
        if isinstance(value, datetime.timedelta):
            if value < datetime.timedelta():
                raise ValueError(f"{name}={value!r} is not a duration before the snapshot.")
            return cls(1000 * (value // datetime.timedelta(microseconds=1)), True)
        return cls(ns_of(value, name), False)


def text_of(name: str, value: Any) -> Any:
    """Returns the value of a condition as JSON can express it; raises as `Selection` does."""
    if name not in TIMES:
        if name not in ("l2_from", "l2_below", "sample"):
            return integer(name, value)
        if math.isinf(found := number(name, value)):
            raise ValueError(f"{name} must be finite, got {value!r}.")
        return found
    moment = Moment.of(name, value)
    if moment.is_duration:
        return f"{moment.ns / 1e9:.9f}".rstrip("0").rstrip(".") + "s"
    time = datetime.datetime.fromtimestamp(moment.ns // 10**9, datetime.timezone.utc)
    return (time + datetime.timedelta(microseconds=moment.ns % 10**9 // 1000)).isoformat()


class Selection:
    """The rows of a table in a snapshot that satisfy conditions.

    Args:
        conditions: the conditions, as in `publish`.
        entry: the table.
        clock: the times of ticks.
        now_ns: the time of the snapshot's watermark.

    Raises:
        TypeError, ValueError: a condition is wrong; the message names it.
    """

    def __init__(
        self, conditions: Mapping[str, Any], entry: TableEntry, clock: Clock, now_ns: int
    ) -> None:
        conditions = given(conditions, WORDS)
        strategy = entry.evict_strategy or "lru"
        check_kind(conditions, entry.name, strategy, has_scores=STRATEGIES[strategy].has_scores)

        def tick(name: str) -> int | None:
            if name not in conditions:
                return None
            moment = Moment.of(name, conditions[name])
            return clock.tick_before(now_ns - moment.ns if moment.is_duration else moment.ns)

        def whole(name: str) -> int | None:
            return integer(name, conditions[name]) if name in conditions else None

        def below(name: str) -> int | None:
            bound = whole(name)
            return None if bound is None else bound - 1

        def after(name: str) -> int | None:
            bound = tick(name)
            return None if bound is None else bound + 1

        self._keys = (whole("key_from"), below("key_below"))
        self._updates = (after("updated_since"), tick("updated_before"))
        self._accesses = (after("accessed_since"), tick("accessed_before"))
        self._scores = (whole("score_from"), below("score_below"))
        self._norms = (
            number("l2_from", conditions.get("l2_from", -1.0)),
            number("l2_below", conditions.get("l2_below", math.inf)),
        )
        self.needs_vectors = bool({"l2_from", "l2_below"} & conditions.keys())
        sample = number("sample", conditions.get("sample", 1.0))
        if not 0 <= sample <= 1:
            raise ValueError(f"sample must be a fraction from 0 to 1, got {sample}.")
        self._sample = round(sample * 2**64)

    def of(
        self,
        keys: Keys,
        updates: npt.NDArray[np.uint64],
        accesses: npt.NDArray[np.uint64],
        vectors: Callable[[], Vectors],
    ) -> npt.NDArray[np.bool_]:
        """Returns which rows [n] satisfy the conditions.

        Args:
            keys: [n].
            updates: [n], ticks.
            accesses: [n], ticks or scores.
            vectors: returns the vectors [n, dimension]; called if `needs_vectors`.
        """
        kept = _within(keys, *self._keys) & _within(updates, *self._updates)
        kept &= _within(accesses, *self._accesses) & _within(accesses, *self._scores)
        if self._sample < 2**64:
            kept &= _within(key_index.mix(keys, _SAMPLE_SALT), None, self._sample - 1)
        if self.needs_vectors:
            norms = np.sqrt(np.square(vectors().astype(np.float64)).sum(axis=1))
            # A row that is not finite has no norm below anything.
            kept &= (norms >= self._norms[0]) & (norms < self._norms[1])
        return kept


def _within(values: npt.NDArray[Any], low: int | None, high: int | None) -> npt.NDArray[np.bool_]:
    """Returns which integers are from `low` to `high`, which need not fit their type."""
    limits = np.iinfo(values.dtype)
    kept = np.ones(values.shape, np.bool_)
    for bound, is_low in ((low, True), (high, False)):
        if bound is None:
            continue
        if bound < limits.min or bound > limits.max:
            if is_low == (bound > limits.max):
                kept[:] = False
            continue
        fitting = values.dtype.type(bound)
        kept &= values >= fitting if is_low else values <= fitting
    return kept

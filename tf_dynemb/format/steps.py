"""The effect of steps with `catch_up` on rows that a later delta does not have.

A row in a snapshot is up to date at the snapshot's watermark. Later steps without a gradient change
it, too. If a delta does not have the row, they only multiply the vector and the state by factors
that are the same for all such rows (docs/catch_up.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# A record has `HEAD` numbers and then `RUN` numbers for each run of steps; docs/file_format.md has
# their meanings.
HEAD = 18
RUN = 3
_WEIGHT_DECAY = 13
_RATES = slice(15, 18)
# Marks of rows are step numbers modulo this.
_MARKS = 1 << 24

Record = Sequence[float]


@dataclasses.dataclass(frozen=True)
class Change:
    """The effect of some steps on rows that have no gradient in them and do not drift.

    Attributes:
        log_decay: the logarithm of the factor of the vectors.
        log_rates: the same for each of the first three states of the rows.
    """

    log_decay: float = 0.0
    log_rates: tuple[float, ...] = (0.0, 0.0, 0.0)

    @classmethod
    def between(cls, before: Record, after: Record) -> Change:
        """Returns the effect of the steps after the first of two snapshots.

        Args:
            before: the record of the first snapshot; empty if it has none.
            after: the record of the second one.
        """
        if not after:
            return cls()
        done = before[0] if before else 0
        number, steps, log_decay = after[1], 0.0, 0.0
        for i in range(HEAD, len(after), RUN):
            count, learning_rate, _ = after[i : i + RUN]
            number += count
            new = min(count, max(number - done, 0))
            steps += new
            kept = abs(1.0 - after[_WEIGHT_DECAY] * learning_rate)
            log_decay += new * math.log(max(kept, 1e-30))
        rates = (steps * math.log(max(rate, 1e-300)) for rate in after[_RATES])
        return cls(log_decay, tuple(rates))

    def __add__(self, other: Change) -> Change:
        """Returns the effect of both."""
        rates = zip(self.log_rates, other.log_rates, strict=True)
        return Change(self.log_decay + other.log_decay, tuple(a + b for a, b in rates))

    @property
    def decay(self) -> np.float32:
        """The factor of the vectors."""
        return np.float32(math.exp(self.log_decay))

    def state(
        self, state: npt.NDArray[np.float32], widths: Sequence[int], record: Record
    ) -> npt.NDArray[np.float32]:
        """Returns the state of rows after these steps.

        Args:
            state: [n, sum of `widths`].
            widths: the widths of the states; the last one is the mark.
            record: the record of the snapshot after these steps.
        """
        changed = np.array(state)
        begin = 0
        for width, rate in zip(widths[:-1], self.log_rates, strict=False):
            if rate:
                changed[:, begin : begin + width] *= np.float32(math.exp(rate))
            begin += width
        changed[:, -1] = record[0] % _MARKS
        return changed


def without_steps(record: Record) -> tuple[float, ...]:
    """Returns a record with the same last step, for rows that have all of its steps."""
    return (record[0], record[0], *record[2:HEAD]) if record else ()


def decays(record: Record) -> bool:
    """Whether the steps of a record can change the vectors of rows that a delta does not have."""
    return len(record) > HEAD and record[_WEIGHT_DECAY] != 0


def changes(records: Sequence[Record]) -> list[Change]:
    """Returns, for each of consecutive snapshots, the effect of all steps after it.

    Args:
        records: the records of the snapshots, oldest first; empty where there is none.
    """
    known = [records[0]]
    for record in records[1:]:
        known.append(record or known[-1])
    result = [Change()]
    for i in range(len(records) - 1, 0, -1):
        result.append(Change.between(known[i - 1], known[i]) + result[-1])
    return result[::-1]


def is_record(numbers: Sequence[Any]) -> bool:
    """Whether numbers of a manifest are a whole record: empty, or with all steps."""
    if not numbers:
        return True
    runs = numbers[HEAD:]
    return (
        len(numbers) >= HEAD
        and len(runs) % RUN == 0
        and all(each > 0 and each == int(each) for each in runs[::RUN])
        and 0 <= numbers[1] == numbers[0] - sum(runs[::RUN])
    )

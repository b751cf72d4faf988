"""Admission: which keys get a row when a lookup that inserts asks for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

UNADMITTED = ("zeros", "initial", "skip")
# As in cc/table/admission.h.
ENTRIES = 23
_MOST_COUNTERS = 2**32  # fewer lines than 2^32, and more counters than a machine has memory for


@dataclasses.dataclass(frozen=True)
class Frequency:
    """Admits a key that lookups that insert have asked for `n` times.

    The counters remember about the last `counters` distinct keys without a row, in 2.8 bytes each.
    A key that comes so rarely that it is forgotten in between starts from 0. About one key in 1000
    shares the counter of another, and can be admitted earlier.

    Example:
    >>> import tf_dynemb as de
    >>> table = de.DynamicVariable(2, "1", admission=de.Frequency(2))
    >>> table.lookup([7]).numpy().tolist(), len(table)
    ([[0.0, 0.0]], 0)
    >>> table.lookup([7]).numpy().tolist(), len(table)
    ([[1.0, 1.0]], 1)

    Args:
        n: in [1, 255]. Each occurrence of an id counts, on all ranks together. A key that reaches
            `n` in a batch has its row in this batch, for all of its occurrences.
        counters: the number of keys that the table remembers, on all ranks together.
        unadmitted: what a key without a row reads as, in training and in evaluation.
            "zeros": as a vector of zeros.
            "initial": as the vector that it would start with.
            "skip": its ids are absent from their bags: they add nothing, and do not count in a
            mean. In lookups without bags they read as zeros.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    n: int
    counters: int = dataclasses.field(default=1_048_576, kw_only=True)
    unadmitted: str = dataclasses.field(default="zeros", kw_only=True)

    def __post_init__(self) -> None:
        _check_integer("n", self.n, 255)
        _check_integer("counters", self.counters, _MOST_COUNTERS)
        _check_unadmitted(self.unadmitted)

    @property
    def lines(self) -> int:
        """The number of lines of counters of all ranks."""
        return -(-self.counters // ENTRIES)


@dataclasses.dataclass(frozen=True)
class Probability:
    """Admits each occurrence of a key without a row with probability `p`.

    A key that occurs m times in a batch therefore gets a row with probability 1 - (1 - p)^m. The
    draws depend on the table's seed, the key and the number of lookups before.

    Args:
        p: in [0, 1].
        unadmitted: as in `Frequency`.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    p: float
    unadmitted: str = dataclasses.field(default="zeros", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or isinstance(self.p, bool) or not 0 <= self.p <= 1:
            raise ValueError(f"p must be in [0, 1], got {self.p!r}.")
        _check_unadmitted(self.unadmitted)


Admission: TypeAlias = Frequency | Probability
_KINDS: dict[str, type[Admission]] = {"Frequency": Frequency, "Probability": Probability}


def as_admission(value: Any) -> Admission | None:
    """Checks the option `admission`; converts the result of `to_config`.

    Raises:
        ValueError: it is something else; the message names the option.
    """
    if value is None or isinstance(value, (Frequency, Probability)):
        return value
    if isinstance(value, Mapping) and value.get("kind") in _KINDS:
        return _KINDS[value["kind"]](**{k: v for k, v in value.items() if k != "kind"})
    raise ValueError(f"admission must be a Frequency, a Probability or None, got {value!r}.")


def to_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns table options with an admission that JSON can express."""
    admission = options.get("admission")
    if not isinstance(admission, (Frequency, Probability)):
        return dict(options)
    config = {"kind": type(admission).__name__, **dataclasses.asdict(admission)}
    return {**options, "admission": config}


def attributes(
    admission: Admission | None, rank: int, ranks: int, owner: int | None
) -> dict[str, Any]:
    """Returns the attributes of the DynembTable operator of a rank.

    A rank has the lines of counters of the keys that it holds: see `cc/table/admission.h`.

    Args:
        admission: the option.
        rank: the rank.
        ranks: the number of ranks.
        owner: the rank that holds all keys; None: they are spread over all ranks.
    """
    if admission is None:
        return {}
    if isinstance(admission, Probability):
        return {
            "admission": "probability",
            "admission_probability": float(admission.p),
            "unadmitted": admission.unadmitted,
        }
    lines = admission.lines
    if owner is None:
        # The hashes of the rank's keys, of 64 bits; their top 32 bits, times ranks, give the rank.
        begin, end = (-(-(r << 32) // ranks) << 32 for r in (rank, rank + 1))
        first, last = begin * lines >> 64, (end - 1) * lines >> 64
    else:
        first, last = 0, lines - 1 if owner == rank else 0  # a table has at least one line
    return {
        "admission": "frequency",
        "admission_times": int(admission.n),
        "admission_lines": lines,
        "admission_first_line": first,
        "admission_num_lines": last + 1 - first,
        "unadmitted": admission.unadmitted,
    }


def _check_integer(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 1 <= value <= most:
        raise ValueError(f"{name} must be an integer in [1, {most}], got {value!r}.")


def _check_unadmitted(value: Any) -> None:
    if value not in UNADMITTED:
        raise ValueError(f"unadmitted must be one of {', '.join(UNADMITTED)}, got {value!r}.")

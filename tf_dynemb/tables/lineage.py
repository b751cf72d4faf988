"""Where the rows of a table come from: its history, and the snapshots of its dumps and loads.

The *history* of a table is an id, drawn when the table is created, that dumps, checkpoints and
flushes record and that a table takes over with their rows. Two states with one history are earlier
and later states of one table, even if they were written by different processes.
"""

from __future__ import annotations

import secrets

# One per minute for a week.
_MOST_SNAPSHOTS = 10_000


def new_history() -> str:
    """Returns an id, 32 hexadecimal digits, that no other table has."""
    return secrets.token_hex(16)


class Snapshots:
    """The snapshots that a table was dumped to or loaded from.

    A call that replaces the rows or their state also replaces the table's `Snapshots` object.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, bool]] = {}

    def note(self, id_: str, tick: int, has_state: bool = True) -> None:
        """Records a snapshot.

        Args:
            id_: the id of the snapshot.
            tick: a tick. All changes of the table that are not in the snapshot were made after it.
            has_state: False if the snapshot has state that was not loaded into the table's rows.
        """
        self._known[id_] = (tick, has_state)
        if len(self._known) > _MOST_SNAPSHOTS:
            del self._known[next(iter(self._known))]

    def __contains__(self, id_: object) -> bool:
        return id_ in self._known

    def items(self) -> list[tuple[str, tuple[int, bool]]]:
        """Returns (id, (tick, has_state)) of each snapshot, in the order of recording."""
        return list(self._known.items())

    def tick(self, id_: str) -> int:
        """Returns the tick after which changes are not in a recorded snapshot."""
        return self._known[id_][0]

    def has_state(self, id_: str) -> bool:
        """Whether the state in the rows continues the state in a recorded snapshot."""
        return self._known[id_][1]

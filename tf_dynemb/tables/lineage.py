"""Snapshots: which dumps a table went through."""

from __future__ import annotations

# A week of one a minute.
_MOST_SNAPSHOTS = 10_000


class Snapshots:
    """Which snapshots a table was dumped to or loaded from.

    What replaces the rows or their state puts another object in the place of the table's.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, bool]] = {}

    def note(self, id_: str, tick: int, has_state: bool = True) -> None:
        """Notes a snapshot.

        Args:
            id_: of the snapshot.
            tick: of a batch; whatever the table has that the snapshot has not was changed after it.
            has_state: False if the snapshot has state that the table's rows did not take over.
        """
        self._known[id_] = (tick, has_state)
        if len(self._known) > _MOST_SNAPSHOTS:
            del self._known[next(iter(self._known))]

    def __contains__(self, id_: object) -> bool:
        return id_ in self._known

    def items(self) -> list[tuple[str, tuple[int, bool]]]:
        """(id, (tick, has_state)) of each, as they were noted."""
        return list(self._known.items())

    def tick(self, id_: str) -> int:
        """The batch after which changes are not in a snapshot that was noted."""
        return self._known[id_][0]

    def has_state(self, id_: str) -> bool:
        """Whether the state in the rows went on from that of a snapshot that was noted."""
        return self._known[id_][1]

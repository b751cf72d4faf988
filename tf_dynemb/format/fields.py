"""Members of a JSON object, checked when they are read."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from tf_dynemb.format.errors import DataLossError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object whose members are checked when they are read.

    Every method raises DataLossError, naming the file and the member, if the member is missing, has
    another type or is out of range.

    Attributes:
        members: the parsed object.
        where: the file and the place in it, for errors.
    """

    members: dict[str, Any]
    where: str

    @staticmethod
    def of(value: Any, where: str) -> Fields:
        """Wraps a value, which must be an object."""
        if not isinstance(value, dict):
            raise DataLossError(f"{where} must be a JSON object, got {value!r:.80}.")
        return Fields(value, where)

    def require(self, condition: bool, name: str, problem: str) -> None:
        """Raises DataLossError unless the condition holds."""
        if not condition:
            raise DataLossError(f"{self.where}: {name} {problem}.")

    def get(self, name: str) -> Any:
        """Returns a member of any type."""
        self.require(name in self.members, name, "is missing")
        return self.members[name]

    def optional(self, name: str, take: Callable[[], T]) -> T | None:
        """Returns None if the member is null, otherwise the result of `take`."""
        return None if self.get(name) is None else take()

    def integer(self, name: str, smallest: int, largest: int = 2**63 - 1) -> int:
        """Returns an integer in a range."""
        return self._integer(name, self.get(name), smallest, largest)

    def integers(self, name: str, smallest: int, largest: int) -> tuple[int, ...]:
        """Returns the elements of a list, which must be integers in a range."""
        return tuple(self._integer(name, value, smallest, largest) for value in self._list(name))

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns the elements of a list, which must be finite numbers; 1 stays an integer."""
        values = self._list(name)
        for value in values:
            finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
            self.require(finite, name, f"must hold finite numbers, got {value!r:.80}")
        return tuple(values)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Returns a string that matches the whole pattern."""
        value = self.get(name)
        matches = isinstance(value, str) and (pattern is None or pattern.fullmatch(value))
        expected = f"a string that matches {pattern.pattern}" if pattern else "a string"
        self.require(bool(matches), name, f"must be {expected}, got {value!r:.80}")
        return str(value)

    def choice(self, name: str, choices: Collection[str]) -> str:
        """Returns a string that is one of `choices`."""
        return self._choice(name, self.get(name), choices)

    def texts(self, name: str, choices: Collection[str]) -> tuple[str, ...]:
        """Returns the elements of a list, each of which must be one of `choices`."""
        return tuple(self._choice(name, value, choices) for value in self._list(name))

    def object(self, name: str) -> Fields:
        """Returns an object."""
        return Fields.of(self.get(name), f"{self.where}: {name}")

    def objects(self, name: str) -> list[Fields]:
        """Returns a list of objects."""
        return [
            Fields.of(value, f"{self.where}: {name}[{i}]")
            for i, value in enumerate(self._list(name))
        ]

    def _list(self, name: str) -> list[Any]:
        value = self.get(name)
        self.require(isinstance(value, list), name, f"must be a list, got {value!r:.80}")
        return list(value)

    def _integer(self, name: str, value: Any, smallest: int, largest: int) -> int:
        fits = type(value) is int and smallest <= value <= largest
        self.require(
            fits, name, f"must be an integer in [{smallest}, {largest}], got {value!r:.80}"
        )
        return int(value)

    def _choice(self, name: str, value: Any, choices: Collection[str]) -> str:
        fits = isinstance(value, str) and value in choices
        self.require(fits, name, f"must be one of {', '.join(choices)}, got {value!r:.80}")
        return str(value)

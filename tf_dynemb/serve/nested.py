"""Nested lists of requests: their elements, as an array if they are numbers, and their lengths."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import simdjson

# What orjson reads sooner: short bodies; texts, with a quote for at most this number of bytes; and
# rows with values by name, whose lists are short.
_LEAST_BYTES = 1024
_TEXT_BYTES = 16
_NAMED_ROWS = re.compile(rb'\s*{\s*"instances"\s*:\s*\[\s*{')
# simdjson looks through all names of an object for one.
_MOST_NAMES = 1000


class Nested(NamedTuple):
    """Nested lists.

    Attributes:
        elements: what is in the innermost lists, one after the other; int64 or float64 as an array.
            If something beside the lists of a level is no list, all of it.
        lengths: of the lists of each level, the outermost first; none for what is no list.
    """

    elements: list[Any] | npt.NDArray[Any]
    lengths: list[list[int]]

    @classmethod
    def of(cls, data: Any) -> Nested:
        """Returns the lists of JSON, or what they are already."""
        if isinstance(data, cls):
            return data
        level, lengths = [data], []
        while level and all(isinstance(each, list) for each in level):
            lengths.append([len(each) for each in level])
            level = list(itertools.chain.from_iterable(level))
        return cls(level, lengths)


def parse(body: bytes) -> Any:
    """Returns what `orjson.loads` does, with tensors of numbers as `Nested`.

    No Python object is made for a number of these. Other lists can be `Nested`, too, or are lists.

    Raises:
        ValueError: the body is not JSON.
    """
    is_text = body.count(b'"') * _TEXT_BYTES > len(body)
    if len(body) >= _LEAST_BYTES and not is_text and not _NAMED_ROWS.match(body):
        try:
            return _Reader().read(body)
        except (ValueError, TypeError, LookupError, RuntimeError):
            pass  # orjson says what is wrong, if anything is
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the request is not JSON: {error}.") from None


class _Reader:
    """Reads one body by simdjson; fails where that does not know all.

    simdjson gives the numbers of nested lists one after the other, and does not say how these are
    nested. `_tensor` looks at every list but those that lie beside a number. There is none of them
    if the body has no more "[" than lists were seen.
    """

    def __init__(self) -> None:
        self._lists = 0

    def read(self, body: bytes) -> dict[str, Any]:
        """Returns the object that a body is. Raises what `parse` catches."""
        given = simdjson.Parser().parse(body)
        value = self._object(given, self._other, inputs=self._inputs, instances=self._tensor)
        if body.count(b"[") != self._lists:
            raise ValueError("a list beside a number, or a string with a bracket")
        return value

    def _object(self, given: Any, default: Any, **read: Any) -> dict[str, Any]:
        if not isinstance(given, simdjson.Object) or len(given) > _MOST_NAMES:
            raise TypeError("not an object, or a large one")
        names = list(given.keys())
        # simdjson looks for a name up to its first NUL, and takes the first value found.
        if len({name.partition("\0")[0] for name in names}) < len(names):
            raise ValueError("two values of a name")
        return {name: read.get(name, default)(given[name]) for name in names}

    def _inputs(self, given: Any) -> Any:
        """Reads "inputs": tensors by name or one of them in V1, a list of objects in V2."""
        if isinstance(given, simdjson.Object):
            return self._object(given, self._tensor)
        if isinstance(given[0], simdjson.Object):
            self._lists += 1
            return [self._object(each, self._other, data=self._tensor) for each in given]
        return self._tensor(given)

    def _tensor(self, given: Any) -> Nested:
        if not isinstance(given, simdjson.Array):
            raise TypeError("not a list")
        level: list[Any] = [given]
        first: Any = given
        lengths: list[list[int]] = []
        while isinstance(first, simdjson.Array):
            if lengths:
                level = list(itertools.chain.from_iterable(level))
            if not all(isinstance(each, simdjson.Array) for each in level):
                raise TypeError("a list beside something else")
            lengths.append([len(each) for each in level])
            first = next((each[0] for each in level if len(each)), None)
        self._lists += sum(map(len, lengths))
        return Nested(_elements(given, level, type(first)), lengths)

    def _other(self, given: Any) -> Any:
        """Reads what is no tensor."""
        if isinstance(given, simdjson.Object):
            given = given.as_dict()
        elif isinstance(given, simdjson.Array):
            given = given.as_list()
        self._lists += _lists_in(given)
        return given


def _lists_in(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_lists_in, value.values()))
    return 1 + sum(map(_lists_in, value)) if isinstance(value, list) else 0


def _elements(lists: Any, innermost: list[Any], kind: type) -> list[Any] | npt.NDArray[Any]:
    """Returns the elements of lists whose first one is of a kind."""
    if kind is int:
        try:
            return np.frombuffer(lists.as_buffer(of_type="i"), np.int64)
        except TypeError:
            kind = float  # of a later one
    if kind is float:
        return np.frombuffer(lists.as_buffer(of_type="d"), np.float64)
    elements = list(itertools.chain.from_iterable(innermost))
    if not all(type(each) is str for each in elements):
        raise TypeError("neither numbers nor strings")
    return elements

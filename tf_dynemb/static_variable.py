"""Variable: a dense embedding matrix, next to which the dynamic ones live."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb import communicator


class Variable(resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """A `tf.Variable` [rows, dimension] for `lookup_sparse`, possibly spread over ranks.

    In one process it holds the whole matrix in every mode.

    Args:
        *args: of `tf.Variable`: the initial value, `trainable`, ...
        mode: None: a copy on every rank; "distributed": rows spread over all ranks;
            "localized:RANK": all rows on one rank.
        **kwargs: of `tf.Variable`.

    Raises:
        ValueError: `mode` is not one of these, or names a rank that does not exist.
    """

    def __init__(self, *args: Any, mode: str | None = None, **kwargs: Any) -> None:
        check_mode(mode)
        super().__init__(*args, **kwargs)
        self._mode = mode

    @property
    def mode(self) -> str | None:
        """How the matrix is spread over ranks, as it was given."""
        return self._mode

    @property
    def size(self) -> Any:
        """An int64 tensor with the variable's shape."""
        return tf.shape(self, out_type=tf.int64)


def check_mode(mode: Any) -> None:
    """Raises ValueError unless `mode` is None, "distributed" or "localized:RANK"."""
    if mode is None or mode == "distributed":
        return
    match = re.fullmatch(r"localized:(\d+)", mode) if isinstance(mode, str) else None
    if match is None:
        raise ValueError(f"mode must be None, 'distributed' or 'localized:RANK', got {mode!r}.")
    size = communicator.get().size
    if int(match.group(1)) >= size:
        raise ValueError(f"mode={mode!r} names rank {match.group(1)}, but there are {size} ranks.")

"""Loading tables from the dumps of NVIDIA SOK."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tf_dynemb._presence import exists, local_path
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.persistence.foreign import ForeignRows, System, load_foreign
from tf_dynemb.sok.dump import file_name_of, read_sok_dump
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable

# Momentum is not included: Keras scales it by the learning rate.
_SOK = System(
    "SOK",
    "load_sok_dump",
    {
        "adagrad": ("Adagrad", ("accumulator",)),
        "adam": ("Adam", ("m", "v")),
        "adamax": ("Adam", ("m", "v")),
        "adadelta": ("Adadelta", ("accum_grad", "accum_var")),
        "ftrl": ("Ftrl", ("accumulator", "linear")),
    },
)


def load_sok_dump(
    directory: str | os.PathLike[str], variables: Any, optimizer: OptimizerWrapper | None = None
) -> None:
    """Replaces the content of tables with a dump that `sok.dump` wrote, from any number of GPUs.

    Every file is checked and loaded into separate tables first; a failure changes nothing. With
    several ranks all of them call this, as with `tf_dynemb.load`, and each loads the rows that it
    owns.

    Args:
        directory: the directory that was passed to `sok.dump`.
        variables: `DynamicVariable`s and `tf_dynemb.Variable`s, as in `tf_dynemb.dump`. They must
            have the names of SOK's variables.
        optimizer: if given, the state in the dump is loaded too if it has the same meaning for this
            optimizer: Adagrad, Adam, Adamax, Adadelta and Ftrl. Other state is dropped, with a
            warning. SOK does not dump the number of steps: set `optimizer.core.iterations` for Adam
            and Adamax.

    Raises:
        OSError: the directory or a file cannot be read.
        TypeError: an element of `variables`, or `optimizer`, has another type.
        ValueError: a file is missing or damaged, or a table differs in dimension, or a key does not
            fit the table's key type; or the ranks name different variables.
        RuntimeError: the function was called inside a `tf.function`, or failed on another rank.
        tf.errors.ResourceExhaustedError: a table cannot hold the rows.
    """

    def read(tables: Mapping[str, DynamicVariable | Variable]) -> dict[str, list[ForeignRows]]:
        folder = local_path(directory, "directory")
        files = {name: _file_name(str(folder), name) for name in tables}
        found = read_sok_dump(folder, files.values())
        return {
            name: [ForeignRows(sok.keys, sok.vectors, sok.states, sok.optimizer)]
            for name, sok in ((name, found[file]) for name, file in files.items())
        }

    load_foreign(_SOK, variables, optimizer, read)


def _file_name(directory: str, name: str) -> str:
    """Returns the prefix of a table's file names; SOK's name can end with TensorFlow's ":0"."""
    with_output = file_name_of(name + ":0")
    return with_output if exists(f"{directory}/{with_output}-key") else file_name_of(name)

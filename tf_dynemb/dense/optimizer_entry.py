"""The entry of the optimizer in a dump: its settings and its progress."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tf_dynemb._warn import warn
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.variables.dynamic import DynamicVariable


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError unless `optimizer` is an OptimizerWrapper or None."""
    if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
        raise TypeError(f"optimizer must be an OptimizerWrapper, got {optimizer!r}.")


def optimizer_entry(
    optimizer: OptimizerWrapper, tables: Mapping[str, DynamicVariable], is_whole: bool = False
) -> dict[str, Any]:
    """Returns the optimizer's entry in a manifest: name, config, iterations, variables (scalars).

    Args:
        optimizer: the optimizer. It may keep variables for a table that are not in its rows.
        tables: the tables that are written, by their names on disk.
        is_whole: whether all of its variables are written as dense variables.
    """
    core = optimizer.core
    config = keras.saving.serialize_keras_object(core)["config"]
    values = {name: float(variable) for name, variable in _scalars(optimizer, tables)}
    for name, table in tables.items():
        arrays = [each for each in optimizer.shared_variables(table) if each.shape != ()]
        if arrays and not is_whole:
            warn(
                f"{type(core).__name__} keeps state of the table {name!r} that is not in its rows, "
                "such as statistics of columns. This dump of tables does not have it: to save it, "
                "dump the model."
            )
    return {
        "name": type(core).__name__,
        # JSON has no infinities, and a user's class may have any object in its config.
        "config": json.loads(json.dumps(config, default=repr), parse_constant=str),
        "iterations": int(core._iterations),
        "variables": {name: value for name, value in values.items() if math.isfinite(value)},
    }


def restore_optimizer(
    optimizer: OptimizerWrapper,
    tables: Mapping[str, DynamicVariable],
    entry: Mapping[str, Any] | None,
) -> None:
    """Sets the number of steps and the scalars that a dump contains for this optimizer.

    If the dump has no optimizer, or another one, the function warns and sets nothing.
    """
    kind = type(optimizer.core).__name__
    if entry is None or entry.get("name") != kind:
        what = "no optimizer" if entry is None else f"the optimizer {entry.get('name')}"
        warn(f"the dump was written with {what}: the settings and steps of {kind} are unchanged.")
        return
    values = entry.get("variables", {})
    for name, variable in _scalars(optimizer, tables):
        if name in values:
            variable.assign(values[name])
    optimizer.core._iterations.assign(entry.get("iterations", 0))


def _scalars(
    optimizer: OptimizerWrapper, tables: Mapping[str, DynamicVariable]
) -> Iterator[tuple[str, keras.Variable]]:
    """Returns the optimizer's scalar variables by names that are the same in every process."""
    groups = {"": optimizer.inner_optimizer.variables}
    for table_name, table in tables.items():
        groups[f"{table_name}: "] = optimizer.shared_variables(table)
    for group, variables in groups.items():
        seen: dict[str, int] = {}
        for variable in variables:
            if variable.shape == () and variable is not optimizer.core._iterations:
                # Keras numbers variables that the optimizer has not named.
                name = re.sub(r"_\d+$", "", variable.name)
                count = seen[name] = seen.get(name, 0) + 1
                yield f"{group}{name}" + (f" {count}" if count > 1 else ""), variable

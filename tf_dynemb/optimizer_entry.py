"""What a dump says of the optimizer: its settings and how far it has come."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tf_dynemb.optimizer import OptimizerWrapper


def optimizer_entry(optimizer: OptimizerWrapper) -> dict[str, Any]:
    """The optimizer's member of a manifest: name, config, iterations, variables (scalars)."""
    core = optimizer.core
    config = keras.saving.serialize_keras_object(core)["config"]
    values = {name: float(variable) for name, variable in _scalars(optimizer)}
    return {
        "name": type(core).__name__,
        # JSON has no infinities, and a user's class may keep anything there.
        "config": json.loads(json.dumps(config, default=repr), parse_constant=str),
        "iterations": int(core.iterations),
        "variables": {name: value for name, value in values.items() if math.isfinite(value)},
    }


def restore_optimizer(optimizer: OptimizerWrapper, entry: Mapping[str, Any] | None) -> None:
    """Sets the steps taken and the scalars that a dump has of this optimizer.

    Warns, and sets nothing, if the dump has none, or another's.
    """
    kind = type(optimizer.core).__name__
    if entry is None or entry.get("name") != kind:
        what = "no optimizer" if entry is None else f"the optimizer {entry.get('name')}"
        warnings.warn(
            f"the dump was written with {what}, so that the steps of {kind} begin anew.",
            stacklevel=6,
        )
        return
    values = entry.get("variables", {})
    for name, variable in _scalars(optimizer):
        if name in values:
            variable.assign(values[name])
    optimizer.core.iterations.assign(entry.get("iterations", 0))


def _scalars(optimizer: OptimizerWrapper) -> Iterator[tuple[str, Any]]:
    """The optimizer's variables that are one number each, by names that are the same every time."""
    groups = {"": optimizer.inner_optimizer.variables}
    for number, variables in enumerate(optimizer.shared_variables):
        groups[f"table {number}: "] = variables
    for group, variables in groups.items():
        seen: dict[str, int] = {}
        for variable in variables:
            if variable.shape == () and variable is not optimizer.core.iterations:
                # Keras numbers what its caller has not named.
                name = re.sub(r"_\d+$", "", variable.name)
                count = seen[name] = seen.get(name, 0) + 1
                yield f"{group}{name}" + (f" {count}" if count > 1 else ""), variable

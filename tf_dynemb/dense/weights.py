"""Dense variables in snapshots: the weights of a model, and what else its training needs.

A snapshot has all of their values, which are written and read as a whole. Rank 0 writes them.
Trainable weights must be the same on all ranks; of the others, such as the random seeds of dropout
and the moving averages of BatchNormalization, each rank writes those in which it differs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dynemb import storage
from tf_dynemb._warn import warn
from tf_dynemb.dense.names import (
    SEEDS,
    Dense,
    Weight,
    dense_variables,
    optimizer_variables,
)
from tf_dynemb.format import safetensors
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel.agreement import Ranks
from tf_dynemb.tables.cut import bits, from_bits
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import unwrap

CHOICES = ("all", "weights", None)
Parts = dict[str, dict[str, safetensors.Array]]


def chosen(dense: Any, variables: Any) -> Dense:
    """Returns the dense variables that a call writes or reads, without those of the optimizer.

    Args:
        dense: the argument of the call: "all", "weights" or None.
        variables: the argument of the call.

    Raises:
        ValueError: `dense` has another value.
        TypeError: a variable has a type or a name that files cannot have.
    """
    if dense not in CHOICES:
        raise ValueError(f'dense must be "all", "weights" or None, got {dense!r}.')
    if dense is None:
        return Dense({}, None)
    weights, seeds = dense_variables(variables)
    for name, variable in weights.items():
        if tf.as_dtype(variable.dtype).name not in safetensors.DTYPES:
            raise TypeError(f"{name!r} has the dtype {variable.dtype}, which dumps cannot have.")
        if not safetensors.is_name(name):
            raise TypeError(f"{name!r} is a name that dumps cannot have.")
    return Dense(weights, seeds if dense == "all" else None)


def with_optimizer(
    dense: Dense,
    variables: Any,
    optimizer: OptimizerWrapper | None,
    tables: Mapping[str, DynamicVariable | Variable],
) -> Dense:
    """Returns the dense variables with those of an optimizer, which is built if it is not.

    Args:
        dense: the result of `chosen`.
        variables: the argument of the call.
        optimizer: the optimizer, or None.
        tables: the tables among the variables, by their names on disk.

    Raises:
        ValueError: another optimizer trains a table.
    """
    if optimizer is None or dense.training is None or not dense.parts:
        return dense
    if not optimizer.built:
        for name, table in tables.items():
            spec = table.state_spec if isinstance(table, DynamicVariable) else None
            if spec is not None and spec[:2] != optimizer.state_spec(table)[:2]:
                raise ValueError(
                    f"optimizer is {optimizer!r}, which has made no step, but the table {name!r} "
                    f"is trained with {spec[0]!r}: pass the optimizer that trains it."
                )
        every = getattr(variables, "trainable_variables", None)
        if every is None:
            every = [*tables.values(), *dense.weights.values()]
        optimizer.build([variable for variable in every if variable.trainable])
    if getattr(optimizer.core, "use_ema", False):
        warn(
            "the averages of rows (use_ema) are not in a dump: after a load, they start from the "
            "rows. The averages of dense weights are in it."
        )
    training = {**dense.training, **optimizer_variables(optimizer, dense.weights, tables)}
    return Dense(dense.weights, training)


def described(dense: Dense) -> list[str]:
    """Returns a description of the variables, for a comparison between ranks."""
    return [
        f"{name!r}: {list(variable.shape)} x {tf.as_dtype(variable.dtype).name}"
        for part in dense.parts.values()
        for name, variable in part.items()
    ]


def check_extra(extra: Any) -> None:
    """Raises TypeError unless `extra` is None or a dict that is the same after JSON."""
    try:
        kept = isinstance(extra, dict) and json.loads(json.dumps(extra, allow_nan=False)) == extra
    except (TypeError, ValueError, RecursionError):
        kept = False
    if extra is not None and not kept:
        raise TypeError(
            "extra must be a dict of what JSON has: texts, numbers, True, False, None, lists, and "
            f"dicts whose keys are texts; got {extra!r:.120}."
        )


def values_of(
    ranks: Ranks,
    dense: Dense,
    variables: Any,
    optimizer: OptimizerWrapper | None,
    tables: Mapping[str, DynamicVariable | Variable],
) -> Parts:
    """Returns the values that this rank writes, by the names of parts and variables.

    All ranks call this. The arguments are those of `with_optimizer`.

    Raises:
        ValueError: a trainable weight is not the same on all ranks; raised on all of them.
    """
    if not dense.parts:
        return {}
    with ranks.stage() as stage:
        dense = with_optimizer(dense, variables, optimizer, tables)
        values: Parts = {
            part: {name: _value(variable) for name, variable in variables.items()}
            for part, variables in dense.parts.items()
        }
        if ranks.size > 1:
            stage.say(
                {
                    part: {
                        name: zlib.crc32(array.values.tobytes()) for name, array in arrays.items()
                    }
                    for part, arrays in values.items()
                }
            )
    if ranks.size == 1:
        return values
    for name, weight in dense.weights.items():
        found = [each["weights"][name] for each in stage.said]
        if weight.trainable and len(set(found)) > 1:
            other = next(rank for rank, each in enumerate(found) if each != found[0])
            raise ValueError(
                f"the weight {name!r} is not the same on rank {other} as on rank 0: give the ranks "
                "the same weights with broadcast_variables or the callback SynchronizeRanks, and "
                "reduce their gradients with OptimizerWrapper."
            )
    if ranks.rank == 0:
        return values
    mine, first = stage.said[ranks.rank], stage.said[0]
    own = {
        part: {
            name: each for name, each in arrays.items() if mine[part][name] != first[part].get(name)
        }
        for part, arrays in values.items()
    }
    return {part: arrays for part, arrays in own.items() if arrays}


def _value(variable: Weight) -> safetensors.Array:
    value = tf.convert_to_tensor(unwrap(variable))
    if value.dtype == tf.bfloat16:
        return safetensors.Array("bfloat16", bits(value))
    # Unlike `.numpy()`, this copies nothing: a variable that is changed gets another buffer.
    return safetensors.Array(value.dtype.name, np.asarray(value))


class Loaded(NamedTuple):
    """Values for dense variables, which are checked, and not yet assigned.

    Attributes:
        of: the models that the variables are of.
        variables: the variables.
        values: a value for each.
    """

    of: Any
    variables: list[Weight]
    values: list[tf.Tensor]

    def assign(self) -> None:
        """Gives the variables their values."""
        for variable, value in zip(self.variables, self.values, strict=True):
            unwrap(variable).assign(value)
        if self.variables:
            finish_layers(self.of)


def read(
    ranks: Ranks,
    snapshots: Sequence[storage.Snapshot],
    dense: Dense,
    variables: Any,
    optimizer: OptimizerWrapper | None,
    tables: Mapping[str, DynamicVariable | Variable],
    cast: bool,
) -> Loaded:
    """Returns the values of the last of some snapshots that has dense variables.

    Args:
        ranks: the ranks; each gets the values that it had, if there are as many as then.
        snapshots: verified snapshots, in order. If there are none, no value is returned.
        dense: the result of `chosen`.
        variables: the argument of the call.
        optimizer: the optimizer whose variables are read too, or None. It is built if everything
            else fits.
        tables: the tables among the variables, by their names on disk.
        cast: whether values can have another dtype on disk.

    Raises:
        ValueError: no snapshot has dense variables; or the variables are others than here, or the
            optimizer is of another kind.
        DataLossError: a file is damaged.
    """
    loaded = Loaded(variables, [], [])
    holder = next((each for each in reversed(snapshots) if each.manifest.dense), None)
    if not dense.parts or not snapshots or (holder is None and not dense.weights):
        return loaded
    if holder is None:
        raise ValueError(
            f"{snapshots[-1]} and the snapshots before it have no dense weights: they "
            "were dumped without the model. Pass dense=None to load only the tables."
        )
    rank = ranks.rank if holder.manifest.world_size == ranks.size else 0

    def take(part: str, named: Mapping[str, Weight], only: str = "") -> None:
        arrays = holder.dense(part, rank)
        if arrays is None:
            raise ValueError(
                f'{holder} was written with dense="weights", and lacks what training needs: '
                'pass dense="weights" to load the weights only.'
            )
        arrays = {name: each for name, each in arrays.items() if name.startswith(only)}
        _check_names(holder, part, named, arrays)
        for name, variable in named.items():
            loaded.variables.append(variable)
            loaded.values.append(_fitting(holder, name, variable, arrays[name], cast))

    take("weights", dense.weights)
    if dense.training is not None and optimizer is None:
        take("training", dense.training, SEEDS)
    elif dense.training is not None and optimizer is not None:
        _check_kind(holder, optimizer)
        take("training", with_optimizer(dense, variables, optimizer, tables).parts["training"])
    if holder is not snapshots[-1]:
        warn(
            f"the dense weights are from {holder}, and older than the rows: the snapshots after it "
            "have no dense weights."
        )
    return loaded


def _check_kind(snapshot: storage.Snapshot, optimizer: OptimizerWrapper) -> None:
    kind = type(optimizer.core).__name__
    entry = snapshot.manifest.optimizer
    there = None if entry is None else entry.get("name")
    if there != kind:
        what = "without an optimizer" if there is None else f"with the optimizer {there}"
        raise ValueError(
            f"{snapshot} was written {what}, and has no state for {kind}: to load the weights and "
            'start with a fresh optimizer, pass dense="weights".'
        )


def _check_names(
    snapshot: storage.Snapshot,
    part: str,
    variables: Mapping[str, Weight],
    arrays: Mapping[str, Any],
) -> None:
    """Raises ValueError unless the names on disk are those of the variables."""
    missing, unknown = sorted(set(variables) - set(arrays)), sorted(set(arrays) - set(variables))
    if missing or unknown:
        here = f", and the model has {_some(missing)}" if missing else ""
        there = _some(unknown) if unknown else "fewer dense variables"
        hint = (
            "A model whose layers have not been called yet lacks their weights: call it once, or "
            "build it."
            if part == "weights"
            else "If the optimizer does not train all trainable weights, build it with the weights "
            "that it trains."
        )
        raise ValueError(
            f"{snapshot} is of a model or an optimizer of another structure: it has "
            f"{there}{here}. {hint}"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _fitting(
    snapshot: storage.Snapshot, name: str, variable: Weight, array: safetensors.Array, cast: bool
) -> tf.Tensor:
    """Returns a value for a variable; raises ValueError if it has another shape or dtype."""
    shape, dtype = tuple(variable.shape), tf.as_dtype(variable.dtype).name
    if array.values.shape != shape or (array.dtype != dtype and not cast):
        hint = " Pass cast=True to convert the values." if array.values.shape == shape else ""
        raise ValueError(
            f"{name!r} has {array.dtype} {list(array.values.shape)} in {snapshot}, but "
            f"{dtype} {list(shape)} in the model.{hint}"
        )
    value = from_bits(np.array(array.values), array.dtype)
    return tf.cast(value, dtype)


def finish_layers(models: Any) -> None:
    """Makes layers use weights that were assigned, where they computed something from them.

    Normalization, for example, computes constants, which functions that were traced have.
    """
    roots = models.values() if isinstance(models, Mapping) else models
    for root in roots if isinstance(models, (Mapping, list, tuple)) else [models]:
        layers = root._flatten_layers() if isinstance(root, keras.layers.Layer) else ()
        finished = [each for each in layers if hasattr(each, "finalize_state")]
        for layer in finished:
            layer.finalize_state()
        for which in ("train", "test", "predict") if finished else ():
            if getattr(root, f"{which}_function", None) is not None:
                getattr(root, f"make_{which}_function")(force=True)

"""PooledGradient: the gradient of a lookup, before it is summed for each key.

One operator sums it and steps the rows while the sums are in the cache, so that only those of
tables with rows in files are written. That is only worth it where nothing else needs the sums.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.variables.dynamic import DynamicVariable


@dataclasses.dataclass(frozen=True)
class PooledGradient:
    """The inputs of the operator that sums a gradient; docs/operators.md has their shapes.

    Attributes:
        sums: an output of that operator.
        keys, rows: the ids of the lookup, and the rows that it found.
        bags, weights, argmax: how the vectors of the ids were pooled.
        upstream: the gradient of the pooled vectors.
        combiner: "sum", "mean", "sqrtn" or "max".
    """

    sums: tf.Tensor
    keys: tf.Tensor
    rows: tf.Tensor
    bags: tf.Tensor
    weights: tf.Tensor
    argmax: tf.Tensor
    upstream: tf.Tensor
    combiner: str

    @property
    def is_only_use(self) -> bool:
        """Whether nothing reads an output of that operator so far. If so, it does not run."""
        return not any(output.consumers() for output in self.sums.op.outputs)


def pooled_gradient(table: DynamicVariable, grad: tf.IndexedSlices) -> PooledGradient | None:
    """Returns the pooled gradient whose sums `grad` are; None if there is none.

    There is one if `grad` is, unchanged, what `tape.gradient` returned for the only lookup in the
    table, in the same `tf.function`.
    """
    if table.inserts_in_steps or tf.executing_eagerly():
        return None
    if communicator.get().size > 1:
        return None  # the ids of a lookup are on several ranks
    sums = grad.values
    op = getattr(sums, "op", None)
    if op is None or op.type != "DynembLookupSparseGrad":
        return None
    if sums.graph is not tf.compat.v1.get_default_graph():
        return None
    n = op.get_attr("N")
    i = sums.value_index - n
    if grad.indices is not op.outputs[i]:
        return None
    keys, rows, bags, weights, argmax, upstream = (op.inputs[k * n + i] for k in range(6))
    combiner = _ops.strings_of(op, "combiners")[i]
    return PooledGradient(sums, keys, rows, bags, weights, argmax, upstream, combiner)

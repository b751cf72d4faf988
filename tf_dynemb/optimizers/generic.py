"""Any other Keras optimizer on a table: the touched rows become a dense variable for one step.

The optimizer's own code runs on the touched rows and their state, and the results are written back.
An optimizer that computes row by row or element by element (Nadam, ScheduleFreeAdamW, most
user-defined ones) therefore gives the same result as in Keras. A computation over the whole matrix
(Adafactor's column statistics and update clipping, Lamb's norms, Muon's orthogonalization if
`exclude_embeddings=False`) is done over the rows that the step touched.
"""

from __future__ import annotations

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.optimizers.gradients import TableGradient
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable


@dataclasses.dataclass(frozen=True)
class _RowState:
    """A state of the optimizer that has a slice for each row.

    Attributes:
        index: its index among the optimizer's variables.
        shape: the shape of one row's slice.
        init: its initial value; None: a copy of the row's vector.
    """

    index: int
    shape: tuple[int, ...]
    init: float | None

    @property
    def width(self) -> int:
        return math.prod(self.shape)


def fresh_copy(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns an optimizer of the same class and settings, without variables.

    If the optimizer is not built, its attributes are copied instead of calling `from_config`,
    because the config of a user's class might not contain all its settings. The copy does no
    clipping, loss scaling, averaging or gradient accumulation: these are done outside.
    """
    if optimizer.built:
        optimizer = type(optimizer).from_config(optimizer.get_config())
    copy = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if not name.startswith("_self_"):  # TensorFlow's records of tracked objects
            copy.__dict__[name] = list(value) if isinstance(value, list) else value
    variables: list[keras.Variable] = []
    is_variable = {"variables": (lambda x: isinstance(x, keras.Variable), variables)}
    copy.__dict__.update(
        _variables=variables,
        _tracker=type(optimizer._tracker)(is_variable),
        _trainable_variables=[],
        _trainable_variables_indices={},
        built=False,
        clipnorm=None,
        clipvalue=None,
        global_clipnorm=None,
        loss_scale_factor=None,
        use_ema=False,
        gradient_accumulation_steps=None,
    )
    return copy


class RowsOptimizer:
    """One Keras optimizer on one table.

    Args:
        template: an optimizer that was never built; see `fresh_copy`.
        table: the table. `attach` adds space for the optimizer's state to its rows.

    Raises:
        NotImplementedError: the optimizer keeps state that cannot be divided into rows.
    """

    def __init__(self, template: keras.optimizers.Optimizer, table: DynamicVariable) -> None:
        self._table = table
        with tf.init_scope():
            self._row_states = _find_row_states(template, table)
            self._optimizer, self._vectors = _build(template, table, rows=2)
        self._states = [self._optimizer._variables[state.index] for state in self._row_states]
        self._copies_vector = any(state.init is None for state in self._row_states)
        for variable in [self._vectors, *self._states]:
            variable._shape = (None, *variable._shape[1:])
        kind = type(template)
        widths = [state.width for state in self._row_states]
        inits = [state.init or 0.0 for state in self._row_states]
        if self._copies_vector:
            # One additional float: whether the row has been stepped before.
            widths, inits = [*widths, 1], [*inits, 0.0]
        name = f"keras:{kind.__module__}.{kind.__qualname__}"
        self.state_spec: StateSpec = (name, tuple(widths), tuple(inits))

    def attach(self, owner: str) -> bool:
        """Adds space for the optimizer's state to the table's rows."""
        return self._table.attach_state(*self.state_spec, owner)

    @property
    def shared_variables(self) -> list[keras.Variable]:
        """Variables that belong to no row: Nadam's product, Adafactor's column statistics."""
        in_rows = {state.index for state in self._row_states}
        return [v for i, v in enumerate(self._optimizer._variables) if i not in in_rows]

    def update(
        self,
        core: keras.optimizers.Optimizer,
        grad: TableGradient,
        use_weight_decay: bool,
        owner: str,
    ) -> None:
        """Steps the touched rows.

        Args:
            core: the user's optimizer, for the learning rate and the step.
            grad: the gradient of this table.
            use_weight_decay: whether the optimizer's weight decay applies to the table.
            owner: the owner of the state; see `DynamicVariable.attach_state`.
        """
        name, widths, inits = self.state_spec
        # Both operators check the owner: another thread can attach another wrapper between them.
        spec = {"optimizer": name, "widths": list(widths), "inits": list(inits), "owner": owner}
        values, state, found = _ops.library().dynemb_read_rows(grad.table.handle, grad.keys, **spec)
        keys, sums, values, state = (
            tf.boolean_mask(column, found) for column in (grad.keys, grad.sums, values, state)
        )
        # The mean over no rows is NaN, and would stay in the shared state. A rank without rows must
        # also update the shared state as the others do. It steps a row of zeros, and writes none.
        count = tf.size(keys)
        pad = tf.cast(count == 0, tf.int32)
        sums, values, state = (tf.pad(rows, [[0, pad], [0, 0]]) for rows in (sums, values, state))
        self._optimizer.__dict__["_iterations"] = core._iterations
        self._optimizer.__dict__["_learning_rate"] = core._learning_rate
        # The number of updates is the number of calls divided by this.
        self._optimizer.__dict__["gradient_accumulation_steps"] = core.gradient_accumulation_steps

        self._load(values, state)
        if use_weight_decay:
            self._optimizer._apply_weight_decay([self._vectors])
        self._optimizer._backend_update_step([sums], [self._vectors], self._optimizer.learning_rate)
        _ops.library().dynemb_write_rows(
            grad.table.handle,
            keys,
            self._vectors.value[:count],
            # An optimizer without state leaves the state of another unchanged.
            (self._stored_state() if widths else state)[:count],
            tf.cast(core.iterations + 1, tf.int64),
            insert=False,
            **spec,
        )

    def _load(self, values: tf.Tensor, state: tf.Tensor) -> None:
        self._vectors.value.assign(values)
        begin = 0
        is_first = state[:, -1:] == 0 if self._copies_vector else None
        for variable, row_state in zip(self._states, self._row_states, strict=True):
            columns = state[:, begin : begin + row_state.width]
            begin += row_state.width
            if row_state.init is None:
                columns = tf.where(is_first, values, columns)
            variable.value.assign(tf.reshape(columns, [-1, *row_state.shape]))

    def _stored_state(self) -> tf.Tensor:
        rows = tf.shape(self._vectors.value)[0]
        columns = [
            tf.reshape(variable.value, [rows, row_state.width])
            for variable, row_state in zip(self._states, self._row_states, strict=True)
        ]
        if self._copies_vector:
            columns.append(tf.ones([rows, 1]))
        return tf.concat([tf.zeros([rows, 0]), *columns], axis=1)


def _build(
    template: keras.optimizers.Optimizer, table: DynamicVariable, rows: int
) -> tuple[keras.optimizers.Optimizer, keras.Variable]:
    """Builds the optimizer for a dense variable [rows, dim] whose number of rows can change."""
    optimizer = fresh_copy(template)
    start = np.arange(1, rows * table.dimension + 1, dtype=np.float32) / 7
    vectors = keras.Variable(
        start.reshape(rows, table.dimension), dtype="float32", autocast=False, name="embeddings"
    )
    vectors._path = f"{table.name.split(':')[0]}/embeddings"
    vectors._value = _growable(vectors.value)
    optimizer.build([vectors])
    for variable in optimizer._variables:
        if tuple(variable.shape)[:1] == (rows,):
            variable._value = _growable(variable.value)
    return optimizer, vectors


def _growable(variable: tf.Variable) -> tf.Variable:
    """Returns a variable with the same value whose first dimension can change."""
    return tf.Variable(variable, shape=[None, *variable.shape[1:]], trainable=False)


def _find_row_states(
    template: keras.optimizers.Optimizer, table: DynamicVariable
) -> list[_RowState]:
    """Finds the states that have a slice for each row: they grow by one row with the matrix."""
    (small, vectors), (large, _) = (_build(template, table, rows) for rows in (2, 3))
    found = []
    for index, (a, b) in enumerate(zip(small._variables, large._variables, strict=True)):
        shape_a, shape_b = tuple(a._shape), tuple(b._shape)
        if shape_a == shape_b:
            continue
        name = f"{type(template).__name__}'s state {a.path!r}"
        if shape_a[:1] != (2,) or shape_b != (3, *shape_a[1:]):
            raise NotImplementedError(
                f"{name} has the shape {shape_a} for 2 rows and {shape_b} for 3: it cannot be kept "
                "in the rows of a table."
            )
        value = np.asarray(a.value)
        if np.all(value == value.flat[0]):
            init: float | None = float(value.flat[0])
        elif value.shape == (2, table.dimension) and np.array_equal(value, vectors.value):
            init = None
        else:
            raise NotImplementedError(
                f"{name} cannot be initialized for new rows of a table: it must start with one "
                "number, or with the vectors."
            )
        found.append(_RowState(index, shape_a[1:], init))
    return found

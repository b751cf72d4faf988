"""Shape functions: known, partly known and unknown shapes; wrong shapes fail while tracing."""

import inspect

import pytest
import tensorflow as tf
from op_helpers import make_table, ops
from operator_calls import operator_calls
from operator_values import DIM, Values
from valid_call import Spec, f32, i32, i64, label, run_eagerly, run_in_graph

CALLS = operator_calls()


def traced_shapes(call, changes, everywhere=False):
    """Adds the call to a graph; returns its outputs' static shapes, with None for unknown."""
    inputs, attributes = call.changed(changes, everywhere)

    def placeholder(spec):
        if not isinstance(spec, Spec):
            return tf.constant(spec)
        if spec.is_table:
            return make_table(DIM)
        return tf.compat.v1.placeholder(spec.dtype, spec.shape)

    with tf.Graph().as_default():
        given = {
            name: [placeholder(entry) for entry in spec]
            if isinstance(spec, list)
            else placeholder(spec)
            for name, spec in inputs.items()
        }
        result = call.operator(**given, **attributes)
        outputs = [] if isinstance(result, tf.Operation) else tf.nest.flatten(result)
        return [None if output.shape.rank is None else output.shape.as_list() for output in outputs]


def test_every_operator_has_a_call():
    registered = {
        name.removeprefix("dynemb_")
        for name, member in inspect.getmembers(ops, inspect.isfunction)
        if name.startswith("dynemb_") and not name.endswith("_eager_fallback")
    }
    assert {call.name for call in CALLS} == registered
    assert len(CALLS) == len(registered)


@pytest.mark.parametrize("call", CALLS, ids=label)
def test_shapes_if_nothing_is_known(call):
    unknown = call.outputs if call.unknown is None else call.unknown
    assert traced_shapes(call, dict.fromkeys(call.inputs), everywhere=True) == unknown


@pytest.mark.parametrize("call", CALLS, ids=label)
def test_shapes_if_ranks_are_known(call):
    changes = {
        name: [None] * len((spec[0] if isinstance(spec, list) else spec).shape)
        for name, spec in call.inputs.items()
    }
    for shape, known in zip(traced_shapes(call, changes, True), call.outputs, strict=True):
        assert len(shape) == len(known)
        assert all(n in (None, m) for n, m in zip(shape, known, strict=True))


RIGHT = [(call, {}, call.outputs) for call in CALLS]
RIGHT += [(call, changes, outputs) for call in CALLS for changes, outputs in call.also]


@pytest.mark.parametrize(("call", "changes", "outputs"), RIGHT, ids=label)
def test_right_shapes_are_inferred(call, changes, outputs):
    assert traced_shapes(call, changes) == outputs


WRONG = [(call, *wrong[:2]) for call in CALLS for wrong in call.all_wrong_shapes()]


@pytest.mark.parametrize(("call", "argument", "change"), WRONG, ids=label)
def test_wrong_shape_fails_while_tracing(call, argument, change):
    message = rf"[Ss]hape|[Dd]imension|rank|[Ll]ength|{argument}"
    with pytest.raises((ValueError, TypeError), match=message):
        traced_shapes(call, {argument: change})


@pytest.mark.parametrize("call", CALLS, ids=label)
def test_values_have_the_types_and_shapes_of_their_inputs(call, tmp_path):
    values, _ = call.arguments(Values(tmp_path))
    for name, spec in call.inputs.items():
        several = isinstance(spec, list)
        pairs = zip(values[name], spec, strict=True) if several else [(values[name], spec)]
        for value, expected in pairs:
            assert value.dtype == expected.dtype
            assert value.shape.is_compatible_with(expected.shape)


def is_known(change):
    return change is not None and not (isinstance(change, list) and None in change)


RUNS = [right for right in RIGHT if all(map(is_known, right[1].values())) and not right[0].error]


@pytest.mark.parametrize(("call", "changes", "outputs"), RUNS, ids=label)
def test_call_succeeds_and_has_the_inferred_shapes(call, changes, outputs, tmp_path):
    ran = []
    for run in (run_eagerly, run_in_graph):
        folder = tmp_path / run.__name__
        folder.mkdir()
        inputs, attributes = call.arguments(Values(folder), changes)
        result = run(call.operator, inputs, attributes)
        ran.append([] if result is None else tf.nest.flatten(result))
    for eager, in_graph, expected in zip(*ran, outputs, strict=True):
        assert eager.shape == in_graph.shape
        assert eager.shape.is_compatible_with(expected)


@pytest.mark.parametrize("call", [call for call in CALLS if call.error], ids=label)
def test_call_that_needs_what_is_missing(call, tmp_path):
    inputs, attributes = call.arguments(Values(tmp_path))
    with pytest.raises(tf.errors.OpError, match=call.error):
        call.operator(**inputs, **attributes)


def test_shapes_of_several_lookups():
    tables = {"dtypes": [f32] * 2, "dims": [2, 3], "combiners": ["sum", "max"], "insert": True}
    with tf.Graph().as_default():
        found = ops.dynemb_lookup_sparse(
            [make_table(2), make_table(3, i32)],
            [tf.compat.v1.placeholder(i64, [6]), tf.compat.v1.placeholder(i32, [4])],
            [tf.constant(2, i64), tf.constant([0, 4], i64)],
            [tf.zeros([0]), tf.zeros([4])],
            [tf.constant(3, i64), tf.constant(1, i64)],
            **tables,
        )
    shapes = [output.shape.as_list() for output in tf.nest.flatten(found)]
    assert shapes == [[3, 2], [1, 3], [6], [4], [0, 2], [1, 3]]


def test_handle_carries_the_dim_through_functions():
    shapes = []

    @tf.function
    def inner(handle, keys):
        values = ops.dynemb_lookup(handle, keys, tf.zeros([0]), insert=True).values
        shapes.append(values.shape.as_list())
        return values

    @tf.function
    def outer(keys):
        shapes.append(inner(tf.identity(make_table(DIM)), keys).shape.as_list())

    outer.get_concrete_function(tf.TensorSpec([5], i64))
    assert shapes == [[5, DIM], [5, DIM]]

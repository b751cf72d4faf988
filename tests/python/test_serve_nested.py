"""The JSON of requests, read into arrays: the same values as with a reader of all JSON."""

import json

import hypothesis
import numpy as np
import orjson
import pytest
from hypothesis import strategies as st

from tf_dynemb.serve import nested, v1
from tf_dynemb.serve.inputs import Dense, Ragged, Tensor
from tf_dynemb.serve.nested import Nested

INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
INTS = st.integers(-(2**65), 2**65)
ATOMS = st.one_of(INTS, st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=3))
ATOMS |= st.none() | st.booleans() | st.just("[") | st.just({"b64": "/w=="}) | st.just({})
# Mostly what requests have, and anything else.
ROWS = st.lists(st.integers(-9, 9), min_size=2, max_size=2)
LISTS = st.one_of(
    st.lists(ROWS, max_size=4),
    st.lists(st.lists(st.integers(-9, 9), max_size=3), max_size=4),
    st.lists(st.lists(st.floats(-9, 9) | st.integers(-9, 9), max_size=3), max_size=4),
    st.lists(st.lists(st.text("ab[", max_size=2), max_size=3), max_size=4),
    st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3), max_leaves=12),
)
NAMES = st.text("ab\0", max_size=2) | st.text(max_size=2)
OTHERS = st.recursive(
    ATOMS, lambda e: st.lists(e, max_size=2) | st.dictionaries(NAMES, e, max_size=2)
)
TENSORS = st.fixed_dictionaries({"name": st.just("x"), "data": LISTS}, optional={"shape": OTHERS})
BODIES = st.one_of(
    st.fixed_dictionaries(
        {"inputs": st.one_of(LISTS, st.dictionaries(st.sampled_from("ab"), LISTS))},
        optional={"signature_name": OTHERS, "outputs": OTHERS},
    ),
    st.fixed_dictionaries({"instances": st.one_of(LISTS, st.lists(OTHERS, max_size=3))}),
    st.fixed_dictionaries(
        {"inputs": st.lists(TENSORS | OTHERS, max_size=3)}, optional={"outputs": OTHERS}
    ),
    OTHERS,
)


def plain(value):
    """What `parse` returns, with all `Nested` and all lists as elements and lengths."""
    if isinstance(value, Nested):
        elements = value.elements
        if isinstance(elements, np.ndarray):
            assert elements.dtype in (np.int64, np.float64)
            elements = elements.tolist()
        return elements, value.lengths
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def alike(found, expected):
    """Compares, where lists in `expected` can be `Nested`."""
    if isinstance(found, tuple):
        elements, lengths = Nested.of(expected)
        # A list with a float somewhere is one of floats.
        assert found == (elements, lengths)
        return
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for name, each in found.items():
            alike(each, expected[name])
    elif isinstance(found, list):
        assert len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            alike(plain(one), two)
    else:
        assert found == expected


@hypothesis.settings(max_examples=1000)
@hypothesis.given(BODIES)
def test_a_body_is_what_orjson_reads(value):
    body = json.dumps(value).encode()
    try:
        expected = orjson.loads(body)
    except orjson.JSONDecodeError:  # text that is not Unicode
        with pytest.raises(ValueError, match="not JSON"):
            nested.parse(body + b" " * 4096)
        return
    alike(plain(nested.parse(body + b" " * 4096)), expected)


def large(value):
    return nested.parse(json.dumps(value).encode() + b" " * 4096)


def test_numbers_are_arrays():
    for name in ("inputs", "instances"):
        found = large({name: [[1, 2], [3, 4]]})[name]
        assert found.elements.dtype == np.int64
        assert found.lengths == [[2], [2, 2]]
    found = large({"inputs": {"a": [[1], [], [2, 3.5]], "b": [["x"], ["y"]]}})["inputs"]
    assert found["a"].elements.dtype == np.float64
    assert found["a"].lengths == [[3], [1, 0, 2]]
    assert found["b"] == Nested(["x", "y"], [[2], [1, 1]])
    found = large({"inputs": [{"name": "x", "shape": [2], "data": [1, 2]}]})["inputs"]
    assert found[0]["shape"] == [2]
    assert found[0]["data"].elements.dtype == np.int64


@pytest.mark.parametrize(
    "data",
    [
        [1, [2]],
        [[1, [2]]],
        [[1], [[2]]],
        [1, [[2], 3]],
        [1, []],
        [[], "ab"],
        [[], "a["],
        ["a", {"b64": "/w=="}],
        ["a", 1],
        [None],
        [{}],
    ],
)
def test_lists_that_are_neither_of_numbers_nor_of_strings(data):
    assert large({"inputs": {"x": data}}) == {"inputs": {"x": data}}


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"inputs": [1,]}', b'{"inputs": [1]} x', b"[" * 5000]
)
def test_what_is_no_json(text):
    with pytest.raises(ValueError, match="the request is not JSON"):
        nested.parse(text + b" " * 4096)


def test_the_last_of_two_values_of_a_name():
    for text, last in (
        ('{"a": 1, "a": 3}', {"a": 3}),
        ('{"a": {"b": 1, "b": 2}}', {"a": {"b": 2}}),
    ):
        assert nested.parse(text.encode() + b" " * 4096) == last
    found = nested.parse(b'{"inputs": {"x": [1], "x": [2]}}' + b" " * 4096)
    assert Nested.of(found["inputs"]["x"]) == ([2], [[1]])


@pytest.mark.parametrize(
    "value",
    [{"": 0, "\0": 1}, {"a\0b": 0, "a": 1}, {"a": 0, "a\0": 1}, {"inputs": [1], "inputs\0": 2}],
)
def test_names_with_a_nul(value):
    for each in (value, {"inputs": [value]}, {"inputs": {"a": 0, "a\0": value}}):
        alike(plain(large(each)), each)


def test_rows_of_a_model_with_one_input():
    inputs = {"x": Dense("x", [Tensor("x", INT64, (None, 2))])}
    for body in ({"instances": [[1, 2], [3, 4]]}, {"inputs": {"x": [[1, 2], [3, 4]]}}):
        (found,) = v1.decode(large(body), inputs)["x"]
        assert found.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("dtype", "data", "message"),
    [
        (INT64, [1, 1.5], "got float"),
        (np.dtype(np.int8), [1, 128], "out of range"),
        (np.dtype(np.uint64), [1, -1], "out of range"),
        (FLOAT32, [1.5, 1e300], "out of range"),
        (np.dtype(bool), [1, 0], "got int"),
        (np.dtype(object), [1, 2], "has int where a string"),
        (INT64, [[1], [2, 3]], "different shapes"),
        (INT64, [[1], [2]], "got the shape"),
    ],
)
def test_arrays_that_do_not_fit(dtype, data, message):
    found = large({"inputs": data})["inputs"]
    assert isinstance(found.elements, np.ndarray)
    with pytest.raises(ValueError, match=message):
        Dense("x", [Tensor("x", dtype, (None,))]).parse(found)


@pytest.mark.parametrize("data", [[[1, 2], [], [3]], [[], []], [[1]], []])
def test_rows_of_different_lengths(data):
    made = Ragged("r", [Tensor("r", INT64, (None,)), Tensor("r_1", INT64, (None,))])
    for found, expected in zip(
        made.parse(large({"inputs": data})["inputs"]), made.parse(data), strict=True
    ):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16", "float32", "float64"])
def test_arrays_of_each_type(dtype):
    found = Dense("x", [Tensor("x", np.dtype(dtype), (None, 2))])
    (array,) = found.parse(large({"inputs": [[1, 2], [3, 4]]})["inputs"])
    assert array.dtype == dtype
    assert array.tolist() == [[1, 2], [3, 4]]

"""The formats of stored vectors: what numbers become, and that all readers agree to the bit."""

from __future__ import annotations

import struct

import chain_writer
import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from chain_writer import Change, Form, Row
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from op_helpers import ops
from served_helpers import describe, lookup, opened, same_bits

import tf_dynemb as de
from tf_dynemb.format.vector_format import FORMATS, convert, decode, encode, join, smaller

QUANTIZED = ("int8", "int4")
COMBINERS = ("sum", "mean", "sqrtn", "max")
numbers = st.floats(width=32, min_value=-60000, max_value=60000)
shapes = array_shapes(min_dims=2, max_dims=2, max_side=9)
vectors = arrays(np.float32, shapes, elements=numbers)
anything = arrays(np.float32, shapes, elements=st.floats(width=32))


def number(row: bytes, at: int) -> float:
    return struct.unpack_from("<e", row, at)[0]


def decoded(row: bytes, dimension: int, name: str) -> list[float]:
    """What docs/file_format.md says that the bytes of a row are."""
    if name == "int8":
        q = struct.unpack_from(f"<{dimension}b", row)
        return [float(np.float32(each * number(row, dimension))) for each in q]
    if name == "int4":
        packed = (dimension + 1) // 2
        scale, bias = number(row, packed), number(row, packed + 2)
        q = [row[c // 2] >> (4 * (c % 2)) & 15 for c in range(dimension)]
        return [float(np.float32(each * scale + bias)) for each in q]
    code = {"float32": "f", "float16": "e", "bfloat16": "H"}[name]
    values = struct.unpack_from(f"<{dimension}{code}", row)
    if name == "bfloat16":
        return [struct.unpack("<f", struct.pack("<I", each << 16))[0] for each in values]
    return list(values)


@pytest.mark.parametrize("name", FORMATS)
@given(values=anything)
def test_rows_are_as_documented(name, values):
    rows = encode(values, name)
    dimension = values.shape[1]
    widths = {
        "float32": 4 * dimension,
        "float16": 2 * dimension,
        "bfloat16": 2 * dimension,
        "int8": dimension + 2,
        "int4": (dimension + 1) // 2 + 4,
    }
    assert rows[0].nbytes == widths[name]
    assert rows.shape == (len(values), FORMATS[name].width(dimension))
    expected = [decoded(row.tobytes(), dimension, name) for row in rows]
    np.testing.assert_array_equal(decode(rows, dimension), np.array(expected, np.float32))


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=300)
@given(values=vectors)
@example(values=np.array([[6e-8, -6e-8, 1e-45]], np.float32))
@example(values=np.array([[1.0, -1.0, 0.0], [0.0, -0.0, 0.0]], np.float32))
def test_errors_of_quantization(name, values):
    found = decode(encode(values, name), values.shape[1])
    exact = values.astype(np.float64)
    low, high = exact.min(axis=1), exact.max(axis=1)
    steps = (high - low) / 15 if name == "int4" else np.abs(exact).max(axis=1) / 127
    # Scales, and int4's least number, are rounded to float16; below 6e-5, to multiples of 6e-8.
    largest = np.abs(exact).max(axis=1)
    if name == "int8":
        most = np.maximum(0.57 * steps, (steps + 6e-8) / 2)
    else:
        most = (steps + np.maximum(np.maximum(steps, largest / 15) * 2**-10, 6e-8)) / 2
    most += largest * 2**-23
    assert (np.abs(found - exact) <= most[:, np.newaxis]).all()
    assert not found[~values.any(axis=1)].any()  # zeros stay zeros


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_that_do_not_fit(name):
    values = np.ones((5, 3), np.float32)
    values[0, 1], values[1, 0], values[2, 2] = np.nan, np.inf, -np.inf
    values[3] = [1e38, -1e38, 0]
    found = decode(encode(values, name), 3)
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3]).all()
    assert found[3][0] > 60000
    np.testing.assert_allclose(found[4], values[4], rtol=1e-3)


def test_numbers_beyond_float16():
    values = np.array([[1e5, -1e5, np.inf, np.nan]], np.float32)
    found = decode(convert(values, 4, "float16"), 4)
    np.testing.assert_array_equal(found, [[65504, -65504, np.inf, np.nan]])


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_nothing(name):
    found = decode(encode(np.zeros((2, 3), np.float32), name), 3)
    assert not found.any()
    assert not np.signbit(found).any()
    assert decode(encode(np.zeros((0, 3), np.float32), name), 3).shape == (0, 3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001])
def test_nan_stays(name, bits):
    values = np.array([[bits, 0]], np.uint32).view(np.float32)
    found = decode(encode(values, name), 2)[0]
    assert np.isnan(found[0])
    assert np.isnan(found[1]) == (name in QUANTIZED)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_stays(name):
    """A second conversion of quantized rows could change them."""
    rows = encode(np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32), name)
    assert convert(rows, 3, name) is rows
    np.testing.assert_array_equal(convert(rows, 3, "float32"), decode(rows, 3))


@given(values=vectors)
def test_joined_formats(values):
    dimension = values.shape[1]
    parts = [encode(values, name) for name in ("int8", "int8")]
    assert join(parts, dimension).dtype == np.int8
    joined = join([*parts, encode(values, "int4")], dimension)
    names = ("int8", "int8", "int4")
    expected = np.concatenate([decode(encode(values, name), dimension) for name in names])
    np.testing.assert_array_equal(joined, expected)


def test_smaller():
    assert smaller("int8", "float16") == "int8"
    assert smaller("float32", "float16") == "float16"
    assert smaller("bfloat16", "float16") == "float16"
    assert [each.dtype for each in FORMATS.values()] == ["f4", "f2", "u2", "i1", "u1"]


def publish_formats(folder, dimension, dtype, stored, rng):
    """Publishes a base and deltas in these formats; returns the rows after all of them."""
    expected: dict[int, np.ndarray] = {}
    last = None
    for place, name in enumerate(stored):
        keys = rng.choice(40, 20, replace=False)
        rows = encode(rng.normal(size=(20, dimension)).astype(np.float32), name)
        absent = np.setdiff1d(np.arange(40), keys)
        gone = [] if last is None else rng.choice(absent, 5, replace=False).tolist()
        times = {"watermark": 10 * place + 10}
        if last is not None:
            times |= {"parent": last.id, "since": last.watermark}
        change = Change({int(k): Row(row) for k, row in zip(keys, rows, strict=True)}, gone)
        form = Form(dimension, dtype=dtype, vector_format=None if name == dtype else name)
        last = chain_writer.publish(
            folder,
            "base" if last is None else "delta",
            {"t": change},
            forms={"t": form},
            ranks=1 + place % 2,
            **times,
        ).manifest
        for key in gone:
            expected.pop(key, None)
        expected.update(zip(map(int, keys), decode(rows, dimension), strict=True))
    return np.array(sorted(expected)), np.stack([expected[key] for key in sorted(expected)])


FORMATS_OF_CHAIN = st.lists(st.sampled_from([*FORMATS]), min_size=1, max_size=7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@settings(max_examples=12)
@given(
    dimension=st.sampled_from([1, 2, 3, 4, 7, 16, 33, 64, 300]),
    stored=FORMATS_OF_CHAIN,
    seed=st.integers(0, 2**32 - 1),
)
def test_readers_agree(tmp_path_factory, dtype, dimension, stored, seed):
    """Whatever the formats of a base and its deltas, readers return the bits of `decode`."""
    folder = tmp_path_factory.mktemp("formats")
    rng = np.random.default_rng(seed)
    keys, values = publish_formats(folder / "chain", dimension, dtype, stored, rng)
    reader = de.serving.Reader(folder / "chain")
    np.testing.assert_array_equal(reader.lookup(keys, "t"), values)
    items = list(reader.items("t", chunk=7))
    found = dict(
        zip(
            np.concatenate([k for k, _ in items]).tolist(),
            np.concatenate([v for _, v in items]),
            strict=True,
        )
    )
    assert sorted(found) == keys.tolist()
    np.testing.assert_array_equal(np.stack([found[key] for key in keys.tolist()]), values)
    table = de.DynamicVariable(dimension, "zeros", "host", dtype=dtype, name="t")
    handle = opened(table, describe(folder, folder / "chain"))
    asked = rng.permutation(np.arange(50))
    table.upsert(keys, values)  # rounded to the dtype
    expected = ops.dynemb_lookup(table.handle, asked, tf.zeros([0], table.dtype), insert=False)[0]
    assert same_bits(lookup(handle, asked, table.dtype), expected)
    assert h.size(handle) == len(keys)
    bags, bag_of = h.random_bags(rng, "indices", 9, len(asked))
    weights = rng.normal(size=len(asked)).astype(np.float32)
    sums = np.zeros((9, dimension), np.float32)
    rows = dict(zip(keys.tolist(), values, strict=True))
    for key, bag, weight in zip(asked.tolist(), bag_of, weights, strict=True):
        if key in rows:
            sums[bag] += weight * rows[key]
    four = [asked] * 4, [bags] * 4, [9] * 4, [dimension] * 4, [weights] * 4
    options = {"dtypes": [table.dtype] * 4, "combiners": COMBINERS, "insert": False}
    pooled = h.lookup_sparse([handle] * 4, *four, **options)
    np.testing.assert_array_equal(pooled[0][0], tf.cast(sums, table.dtype))
    if dtype == "float32":
        trained = h.lookup_sparse([table.handle] * 4, *four, **options)
        for i in range(4):
            assert same_bits(pooled[0][i], trained[0][i])
            assert same_bits(pooled[2][i], trained[2][i])
    loaded = de.DynamicVariable(dimension, "zeros", "host", dtype=dtype, name="t")
    de.load(folder / "chain", {"t": loaded}, dense=None)
    assert len(loaded) == len(keys)
    assert same_bits(loaded.lookup(asked, insert=False), expected)

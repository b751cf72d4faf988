"""Helpers for the operator tests: tables, lookups in every bag form, and a model of one table."""

import contextlib

import gpu
import ml_dtypes
import numpy as np
import tensorflow as tf

from tf_dynemb import _ops

ops = _ops.library()

KEY_TYPES = (tf.int64, tf.int32, tf.uint64)
VALUE_TYPES = (tf.float32, tf.float16, tf.bfloat16)
EXTREMES = {
    tf.int64: (-(2**63), -1, 0, 1, 2**63 - 1),
    tf.int32: (-(2**31), -1, 0, 1, 2**31 - 1),
    tf.uint64: (0, 1, 2**63 - 1, 2**63, 2**64 - 1),
}
NO_ROW = 0xFFFFFFFF
NO_WEIGHTS = np.zeros(0, np.float32)

HYPER = np.array([0.5, 0.9, 0.999, 1e-7, 0.5, 0, 0, 0, 0, -0.5, 0, 1], np.float32)


def make_table(dim=4, key=tf.int64, dtype=tf.float32, initial=0.0, random=False, **options):
    """Creates a table whose initial vectors are the constant(s) `initial`, or random.

    TensorFlow would put tables in host memory on a GPU, too, if it sees one.
    """
    if random:
        kinds, args = ["uniform"], [-1.0, 1.0]
    else:
        columns = np.ravel(initial)
        kinds = ["constant"] * len(columns)
        args = [float(x) for c in columns for x in (c, 0.0)]
    options.setdefault("stochastic_rounding", False)
    if gpu.ON:
        options.setdefault("tier", "hybrid")
        options.setdefault("max_hbm_bytes", gpu.HBM_BYTES)
    in_host_memory = options.get("tier", "host") == "host"
    with tf.device(_ops.CPU) if in_host_memory else contextlib.nullcontext():
        return ops.dynemb_table(
            key_dtype=key,
            dtype=dtype,
            dim=dim,
            initializers=kinds,
            initializer_args=args,
            **options,
        )


def lookup(handle, keys, insert=True, default=None, dtype=tf.float32):
    default = tf.zeros([0], dtype) if default is None else tf.cast(default, dtype)
    keys = np.asarray(keys, np.int64) if isinstance(keys, list) else keys
    return ops.dynemb_lookup(handle, keys, default, insert=insert)


def lookup_sparse(handles, keys, bags, num_bags, dims, weights=None, **options):
    n = len(handles)
    options.setdefault("insert", True)
    options.setdefault("combiners", ["sum"] * n)
    options.setdefault("dtypes", [tf.float32] * n)
    return ops.dynemb_lookup_sparse(
        handles=handles,
        keys=keys,
        bags=bags,
        weights=[NO_WEIGHTS] * n if weights is None else weights,
        num_bags=[tf.constant(b, tf.int64) for b in num_bags],
        dims=dims,
        **options,
    )


def apply_sgd(handles, keys, grads, rows=None, momentum=False, hyper=HYPER, step=1):
    return ops.dynemb_apply_gradients(
        handles=handles,
        keys=keys,
        rows=[np.zeros(0, np.uint32)] * len(handles) if rows is None else rows,
        grads=grads,
        hyper=hyper,
        step=step,
        optimizer="sgd",
        flags=["momentum"] if momentum else [],
        state="sgd momentum",
        inits=[0.0] if momentum else [],
    )


def export(handle, limit=2**31, since=0, key=tf.int64, dtype=tf.float32):
    """Reads all rows, at most `limit` at a time; returns keys, values, state, updates."""
    cursor, chunks = 0, []
    while cursor >= 0:
        *chunk, cursor = ops.dynemb_export(handle, cursor, limit, since, key_type=key, dtype=dtype)
        assert len(chunk[0]) <= limit
        chunks.append([c.numpy() for c in chunk])
        cursor = int(cursor)
    return [np.concatenate(parts) for parts in zip(*chunks, strict=True)]


def stats(handle):
    names, values = ops.dynemb_stats(handle)
    return dict(zip([n.decode() for n in names.numpy()], values.numpy().tolist(), strict=True))


def size(handle):
    return int(ops.dynemb_size(handle))


def round_to(dtype, x):
    """Returns `x` as float32 after rounding to `dtype`, to nearest even."""
    if dtype == tf.float32:
        return np.asarray(x, np.float32)
    kind = np.float16 if dtype == tf.float16 else ml_dtypes.bfloat16
    return np.asarray(x, np.float32).astype(kind).astype(np.float32)


def random_bags(rng, form, num_bags, nnz):
    """Returns a *bags* tensor and the bag of every id; `uniform` may use fewer than nnz ids."""
    if form == "uniform":
        hotness = nnz // num_bags
        return np.int64(hotness), np.repeat(np.arange(num_bags), hotness)
    bag_of = np.sort(rng.integers(0, num_bags, nnz))
    if form == "splits":
        return np.searchsorted(bag_of, np.arange(num_bags + 1)).astype(np.int64), bag_of
    if form == "unsorted":
        bag_of = rng.permutation(bag_of)
    columns = rng.integers(-3, 3, [nnz, {"indices": 2, "unsorted": 2, "one": 1, "wide": 4}[form]])
    columns[:, 0] = bag_of
    return columns.astype(np.int64), bag_of


FORMS = ("uniform", "splits", "indices", "unsorted", "one", "wide")


def pool(vectors, bag_of, num_bags, weights, combiner):
    """Returns the pooled vectors and the argmax that lookup_sparse must return."""
    pooled = np.zeros([num_bags, vectors.shape[1]], np.float32)
    argmax = np.full(pooled.shape, -1, np.int32)
    for b in range(num_bags):
        positions = np.flatnonzero(bag_of == b)
        if not len(positions):
            continue
        w = np.ones(len(positions)) if weights is None else weights[positions].astype(np.float64)
        products = w[:, None] * vectors[positions]
        if combiner == "max":
            argmax[b] = positions[np.argmax(products, 0)]
            pooled[b] = np.max(products, 0)
        else:
            divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
            pooled[b] = products.sum(0) / divisor if divisor else 0
    return pooled, argmax


class Model:
    """A dict with the operators' semantics; vectors are float32, rounded to `dtype` when stored."""

    def __init__(self, dtype, initial):
        self.dtype, self.initial = dtype, np.asarray(initial, np.float32)
        self.vectors, self.momentum = {}, {}

    def row(self, key):
        if key not in self.vectors:
            self.vectors[key] = self.initial.copy()
            self.momentum[key] = np.zeros_like(self.initial)
        return self.vectors[key]

    def read(self, key, default=None):
        return self.vectors.get(key, self.initial if default is None else default)

    def set(self, key, vector):
        self.row(key)
        self.vectors[key] = round_to(self.dtype, vector)

    def sum_by_key(self, keys, values):
        sums = {}
        for key, value in zip(keys, values, strict=True):
            sums[key] = sums.get(key, np.float32(0)) + value
        return sums

    def accumulate(self, keys, deltas):
        for key, delta in self.sum_by_key(keys, deltas).items():
            self.set(key, self.row(key) + delta)

    def apply(self, keys, grads):
        for key, grad in self.sum_by_key(keys, grads).items():
            if key not in self.vectors:
                continue
            self.momentum[key] = self.momentum[key] * HYPER[4] - grad * HYPER[0]
            self.set(key, self.vectors[key] + self.momentum[key])

    def erase(self, keys):
        gone = {k for k in keys if k in self.vectors}
        for key in gone:
            del self.vectors[key], self.momentum[key]
        return len(gone)


DIM = 3
INITIAL = [0.25, -1.5, 3.0]
ALL_TYPES = [(k, v) for k in KEY_TYPES for v in VALUE_TYPES]
type_ids = ["-".join(t.name for t in pair) for pair in ALL_TYPES]


def make(key=tf.int64, dtype=tf.float32, **options):
    return make_table(DIM, key, dtype, INITIAL, **options)


def some_keys(rng, key):
    """Returns 40 keys: the extremes of the type, and random keys over its range."""
    low, high = key.min, key.max
    others = [int(rng.integers(low, high, dtype=key.as_numpy_dtype)) for _ in range(35)]
    return np.array([*EXTREMES[key], *others], key.as_numpy_dtype)


def quarters(rng, *shape):
    """Returns numbers that, like small sums of them, every value type represents exactly."""
    return (rng.integers(-16, 17, shape) / 4).astype(np.float32)

"""Models with tables, and requests to them."""

import keras
import numpy as np
import tensorflow as tf
from row_memory import host_memory

import tf_dynemb as de
from tf_dynemb import layers

KNOWN = np.arange(40)
EXTREMES = np.array([-(2**63), 2**63 - 1, -1, 0], np.int64)


def ids(*shape, seed=1):
    """Known, unknown and extreme ids, and the padding id 0."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 80, shape)
    flat = drawn.reshape(-1)
    flat[: len(EXTREMES)] = EXTREMES[: len(flat)]
    return tf.constant(drawn, tf.int64)


def fill(model):
    """Gives the known keys rows, in all tables of a model."""
    rng = np.random.default_rng(2)
    for table in de.filter_variables(model.variables)[0]:
        if isinstance(table, de.DynamicVariable):
            keys = KNOWN.astype(table.key_type.as_numpy_dtype)
            table.upsert(keys, rng.normal(size=[len(keys), table.dimension]))
    return model


def dense():
    inputs = keras.Input([5], dtype="int64")
    vectors = layers.Embedding(3, padding_id=0)(inputs)
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(vectors))
    return keras.Model(inputs, outputs), ids(7, 5)


def default_vector():
    inputs = keras.Input([5], dtype="int64")
    outputs = layers.Embedding(4, combiner="mean", default_vector=0.25)(inputs)
    return keras.Model(inputs, outputs), ids(7, 5)


def sequence():
    inputs = keras.Input([None], dtype="int64")
    vectors = layers.Embedding(4, mask_zero=True)(inputs)
    return keras.Model(inputs, keras.layers.GRU(3)(vectors)), ids(6, 9)


def two_towers():
    user, items = keras.Input([1], dtype="int64"), keras.Input([6], dtype="int64")
    weights = keras.Input([6])
    tower = layers.Embedding(4, initializer="normal")(user)[:, 0]
    bag = layers.EmbeddingBag(4, combiner="sqrtn")(items, weights)
    score = keras.layers.Dot(1)([tower, bag])
    weight = tf.constant(np.random.default_rng(3).uniform(size=[8, 6]), tf.float32)
    return keras.Model([user, items, weights], score), [ids(8, 1), ids(8, 6, seed=2), weight]


def multi_task():
    inputs = {name: keras.Input([3], dtype="int64", name=name) for name in ("user", "item")}
    tables = [{"dim": 4}, {"dim": 2, "initializer": "ones"}]
    vectors = layers.MultiTableEmbedding(4, tables, {"user": 0, "item": 1})(inputs)
    flat = [keras.layers.Flatten()(vectors[name]) for name in ("user", "item")]
    both = keras.layers.Concatenate()(flat)
    outputs = {name: keras.layers.Dense(1, name=name)(both) for name in ("click", "buy")}
    return keras.Model(inputs, outputs), {"user": ids(4, 3), "item": ids(4, 3, seed=5)}


def half():
    inputs = keras.Input([3], dtype="int64")
    outputs = layers.Embedding(6, combiner="sum", dtype="bfloat16")(inputs)
    return keras.Model(inputs, outputs), ids(9, 3)


def strings():
    inputs = keras.Input([2], dtype="string")
    outputs = layers.Embedding(3, hash_strings=True, combiner="mean")(inputs)
    return keras.Model(inputs, outputs), tf.constant([["a", "b"], ["", "ü"]])


class Dlrm(keras.Model):
    """A table per feature, of which one is an attribute of the model, and a static variable."""

    def __init__(self):
        super().__init__()
        self.bags = layers.EmbeddingBag(4, combiner="mean", admission=de.Frequency(2))
        self.shared = de.DynamicVariable(4, "uniform", "host", name="shared")
        self.static = de.Variable(np.arange(40).reshape(10, 4) / 8, dtype=tf.float32, name="static")
        self.bottom, self.top = keras.layers.Dense(4), keras.layers.Dense(1, "sigmoid")

    def call(self, inputs):
        features = [
            self.bottom(inputs["dense"]),
            self.bags(inputs["bag"]),
            de.lookup_sparse(self.shared, inputs["bag"], combiners="sum"),
            tf.gather(self.static, inputs["row"]),
        ]
        stacked = tf.stack(features, 1)
        products = tf.reshape(tf.matmul(stacked, stacked, transpose_b=True), [-1, 16])
        return self.top(tf.concat([features[0], products], 1))


def dlrm():
    rng = np.random.default_rng(4)
    request = {
        "dense": tf.constant(rng.normal(size=[5, 3]), tf.float32),
        "bag": ids(5, 4),
        "row": tf.constant([0, 9, 3, 3, 1], tf.int64),
    }
    model = Dlrm()
    model(request, training=False)
    return model, request


def sparse():
    """Sparse ids and weights."""
    ids_ = keras.Input([6], dtype="int64", sparse=True, name="ids")
    weights = keras.Input([6], sparse=True, name="weights")
    bag = layers.EmbeddingBag(4, "sqrtn", "normal", padding_id=-1)
    vectors = layers.Embedding(3, combiner="mean", padding_id=0)
    inputs = {"ids": ids_, "weights": weights}
    model = keras.Model(inputs, [bag(ids_, weights), vectors(ids_)])
    at = [[0, 0], [0, 3], [0, 4], [1, 5], [3, 0], [3, 1], [3, 2], [4, 4]]  # row 2 is empty
    weight = np.random.default_rng(6).uniform(size=len(at))
    request = {
        "ids": tf.SparseTensor(at, ids(len(at)), [5, 6]),
        "weights": tf.SparseTensor(at, tf.constant(weight, tf.float32), [5, 6]),
    }
    return model, request


def ragged():
    """Ragged ids and weights of rank 2, and ragged ids of rank 3; ragged outputs."""
    ids_ = keras.Input([None], dtype="int64", ragged=True)
    weights = keras.Input([None], ragged=True)
    nested = keras.Input([None, None], dtype="int64", ragged=True)
    bag = layers.EmbeddingBag(4, "sum", "normal", padding_id=-1)
    outputs = [bag(ids_, weights), bag(nested), layers.Embedding(2, padding_id=0)(ids_)]
    splits = [0, 3, 3, 4, 9]
    weight = tf.constant(np.random.default_rng(7).uniform(size=9), tf.float32)
    first = tf.RaggedTensor.from_row_splits(ids(9), splits)
    request = [
        first,
        tf.RaggedTensor.from_row_splits(weight, splits),
        tf.RaggedTensor.from_row_splits(first, [0, 2, 2, 4]),
    ]
    return keras.Model([ids_, weights, nested], outputs), request


def in_files(folder):
    """Two tables of which most rows are in files."""
    options = {"var_type": "file", "file_path": str(folder)}
    options["max_dram_for_vectors"] = host_memory(70, 3)
    inputs = keras.Input([5], dtype="int64")
    vectors = layers.Embedding(3, padding_id=0, **options)
    bag = layers.EmbeddingBag(3, initializer="normal", **options)
    model = keras.Model(inputs, [vectors(inputs), bag(inputs)])
    rng = np.random.default_rng(8)
    for first in range(0, 400, 40):
        for layer in (vectors, bag):
            layer.table.upsert(first + KNOWN, rng.normal(size=[len(KNOWN), 3]))
    known = np.append(EXTREMES, rng.integers(0, 500, 31))
    assert all(layer.table.stats()["file_rows"] > 200 for layer in (vectors, bag))
    return model, tf.constant(known.reshape(7, 5), tf.int64)


KERAS = (dense, default_vector, sequence, two_towers, multi_task, half, strings, dlrm)


class Module(tf.Module):
    """Lookups of every kind, with inputs of every kind; two signatures."""

    def __init__(self):
        super().__init__()
        self.user = de.DynamicVariable(4, "normal", "host", name="user")
        self.item = de.DynamicVariable(
            3, "uniform", "host", name="item", key_type=tf.uint64, dtype=tf.float16
        )
        # It has the name of the first.
        self.other = {"a": de.DynamicVariable(2, 0.5, "host", name="user", key_type=tf.int32)}
        self.static = de.Variable(np.arange(12).reshape(6, 2), dtype=tf.float32)
        self.scale = tf.Variable(3.0)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.int64, 1),
            tf.SparseTensorSpec([None, None], tf.uint64),
        ]
    )
    def serve(self, dense, ragged, sparse):
        tables = [self.user, self.item, self.static]
        pooled = de.lookup_sparse(tables, [ragged, sparse, dense % 6], combiners="max")
        vectors, exists = self.user.lookup(dense, insert=False, return_exists=True)
        return {
            "lookup": self.user.lookup(dense) * self.scale,
            "embedding_lookup": tf.nn.embedding_lookup(self.user, dense),
            "gather": tf.gather(self.other["a"], tf.cast(dense % 50, tf.int32)),
            "sparse": tf.nn.safe_embedding_lookup_sparse(self.user, ragged.to_sparse()),
            **{f"pooled{i}": each for i, each in enumerate(pooled)},
            "vectors": vectors,
            "exists": exists,
            "default": self.user.lookup(dense, insert=False, default_value=tf.ones([4])),
            "size": self.user.size,
        }

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def rows(self, dense):
        return de.lookup_sparse(self.user, dense, combiners="sum", insert=True, max_norm=1.5)


def module():
    made = fill(Module())
    ragged = tf.ragged.constant([[1, -1, 70], [], [5]], dtype=tf.int64)
    sparse = tf.SparseTensor(
        [[0, 0], [0, 1], [2, 0]], tf.constant([3, 2**64 - 1, 7], tf.uint64), [3, 4]
    )
    return made, [ids(9), ragged, sparse]

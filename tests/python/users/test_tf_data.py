"""A user with tf.data: records on disk, parsing, hashed strings, ragged batches, prefetched ids."""

import keras
import numpy as np
import tensorflow as tf
from user_helpers import check_same_losses, dense_layer, initial_vectors, labels, numbers

import tf_dynemb as de

NUMBERS = numbers(60, seed=50)
TAGS = [numbers(n % 4, seed=60 + n) for n in range(60)]
LABELS = labels([NUMBERS])


def hashes(rows):
    """The ids of row numbers: hashes of strings, as TensorFlow computes them."""
    strings = tf.strings.as_string(tf.constant(rows))
    return tf.strings.to_hash_bucket_fast(strings, 2**63 - 1)


def write(path):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number, tags, label in zip(NUMBERS, TAGS, LABELS, strict=True):
            feature = {
                "user": [str(number).encode()],
                "tags": [str(tag).encode() for tag in tags],
            }
            features = {
                name: tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
                for name, values in feature.items()
            }
            features["label"] = tf.train.Feature(
                float_list=tf.train.FloatList(value=[float(label)])
            )
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def dataset(path, to_ids):
    spec = {
        "user": tf.io.FixedLenFeature([], tf.string),
        "tags": tf.io.RaggedFeature(tf.string),
        "label": tf.io.FixedLenFeature([1], tf.float32),
    }

    def parse(records):
        parsed = tf.io.parse_example(records, spec)
        features = {
            "user": to_ids(parsed["user"]),
            "tags": tf.ragged.map_flat_values(to_ids, parsed["tags"]),
        }
        return features, parsed["label"]

    return tf.data.TFRecordDataset([str(path)]).batch(15).map(parse).prefetch(2)


class Model(keras.Model):
    def __init__(self, users, pool_tags):
        super().__init__()
        self.users, self.pool_tags = users, pool_tags
        self.head = dense_layer(1, activation="sigmoid")

    def call(self, features):
        tags = self.pool_tags(features["tags"])
        return self.head(tf.concat([self.users(features["user"]), tags], axis=1))


class SumOfTags(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(40, 4)

    def call(self, tags):
        return tf.reduce_sum(tags.with_flat_values(self.embedding(tags.flat_values)), axis=1)


def train(model, optimizer, data):
    keras.utils.set_random_seed(12)
    model.head.build([None, 8])
    model.compile(optimizer, "binary_crossentropy")
    return model.fit(data, epochs=4, verbose=0).history["loss"]


def test_the_losses_are_as_in_keras(tmp_path):
    write(tmp_path / "train.tfrecord")
    users, tags = initial_vectors(4, seed=6), initial_vectors(4, seed=7)
    sums = SumOfTags()
    reference = Model(keras.layers.Embedding(40, 4), sums)
    for layer, vectors in ((reference.users, users), (sums.embedding, tags)):
        layer.build()
        layer.set_weights([vectors])
    to_rows = lambda strings: tf.strings.to_number(strings, tf.int64)  # noqa: E731
    data = dataset(tmp_path / "train.tfrecord", to_rows)
    expected = train(reference, keras.optimizers.SGD(0.5), data)

    dynamic = Model(de.layers.Embedding(4), de.layers.EmbeddingBag(4, combiner="sum"))
    for layer, vectors in ((dynamic.users, users), (dynamic.pool_tags, tags)):
        layer.table.upsert(hashes(np.arange(40)), vectors)
    to_hashes = lambda strings: tf.strings.to_hash_bucket_fast(strings, 2**63 - 1)  # noqa: E731
    data = dataset(tmp_path / "train.tfrecord", to_hashes)
    losses = train(dynamic, de.OptimizerWrapper(keras.optimizers.SGD(0.5)), data)
    check_same_losses(losses, expected)

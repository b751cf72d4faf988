"""A user of TFRA: three of its documented scripts, with one changed import.

Instead of MovieLens and the Amazon reviews, which must be downloaded, ids and ratings are drawn at
random. References: the losses of the same models over dense embeddings.
"""

import keras
import numpy as np
import tensorflow as tf
from user_helpers import check_same_losses, dense_layer, initial_vectors, labels, numbers, raw

import tf_dynemb.tfra as tfra
from tf_dynemb.tfra import dynamic_embedding as de

USERS, MOVIES = numbers(120, seed=70), numbers(120, seed=71)
RATINGS = labels([USERS, MOVIES]) * 4 + 1


# 1. docs/tutorials/dynamic_embedding_tutorial: get_variable, embedding_lookup with its trainable,
#    np.unique in `call`, an eager loop.


class NCFModel(keras.Model):
    def __init__(self, look_up):
        super().__init__()
        self.look_up = look_up
        self.d0 = dense_layer(16, activation="relu")
        self.d1 = dense_layer(1)
        self.loss_fn = keras.losses.MeanSquaredError()

    def call(self, batch):
        trainables, vectors = [], []
        for name in ("user_id", "movie_id"):
            ids, places = np.unique(batch[name], return_inverse=True)
            weights, trainable = self.look_up(name, ids)
            vectors.append(tf.gather(weights, places))
            trainables.append(trainable)
        out = tf.reshape(self.d1(self.d0(tf.concat(vectors, axis=1))), [-1])
        return self.loss_fn(batch["user_rating"], out), trainables


def train_ncf(model, optimizer, ids):
    model.d0.build([None, 16])
    model.d1.build([None, 16])
    features = {"user_id": ids(USERS), "movie_id": ids(MOVIES), "user_rating": RATINGS}
    losses = []
    for _ in range(3):
        for batch in tf.data.Dataset.from_tensor_slices(features).batch(30):
            with tf.GradientTape() as tape:
                loss, trainables = model(batch)
            variables = model.trainable_variables + trainables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            losses.append(float(loss))
    return losses


def test_the_tutorial():
    start = {"user_id": initial_vectors(8, seed=1), "movie_id": initial_vectors(8, seed=2)}
    dense = {name: tf.Variable(vectors) for name, vectors in start.items()}
    model = NCFModel(lambda name, ids: (tf.nn.embedding_lookup(dense[name], ids), dense[name]))
    optimizer = keras.optimizers.SGD(0.05)
    expected = train_ncf(model, optimizer, lambda ids: ids)

    class Tutorial(NCFModel):
        def __init__(self):
            super().__init__(self.look_up_dynamic)
            self.tables = {
                name: tfra.dynamic_embedding.get_variable(
                    name=f"{name}_dynamic_embeddings",
                    dim=8,
                    initializer=keras.initializers.RandomNormal(-1, 1),
                )
                for name in start
            }

        def look_up_dynamic(self, name, ids):
            return tfra.dynamic_embedding.embedding_lookup(
                params=self.tables[name], ids=ids, name=f"{name}-weights", return_trainable=True
            )

    model = Tutorial()
    for name, vectors in start.items():
        model.tables[name].upsert(raw(np.arange(40)), vectors)
    optimizer = tfra.dynamic_embedding.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.05))
    check_same_losses(train_ncf(model, optimizer, raw), expected)


# 2. demo/movielens-1m-keras: SquashedEmbedding in a subclassed model whose call is a tf.function,
#    compile and fit with a dict of ids, weights that are saved and loaded.


class DualChannelsDeepModel(keras.Model):
    def __init__(self, user_embedding, movie_embedding):
        super().__init__()
        self.user_embedding, self.movie_embedding = user_embedding, movie_embedding
        self.dnn1 = dense_layer(16, activation="relu")
        self.dnn2 = dense_layer(5, activation="softmax")
        self.bias_net = dense_layer(5, activation="softmax")

    @tf.function
    def call(self, features):
        user_id = tf.reshape(features["user_id"], (-1, 1))
        movie_id = tf.reshape(features["movie_id"], (-1, 1))
        latent = [self.user_embedding(user_id), self.movie_embedding(movie_id)]
        latent = tf.concat([tf.reshape(x, (-1, 8)) for x in latent], axis=1)
        return 0.2 * self.dnn2(self.dnn1(latent)) + 0.8 * self.bias_net(latent)


def build_dense_layers(model):
    # A tf.function would keep the first values of variables that are created while it is traced.
    for layer in (model.dnn1, model.dnn2, model.bias_net):
        layer.build([None, 16])


def fit_dual(model, optimizer, ids):
    build_dense_layers(model)
    model.compile(optimizer, keras.losses.MeanSquaredError(), metrics=[keras.metrics.AUC()])
    features = {"user_id": ids(USERS), "movie_id": ids(MOVIES)}
    ratings = tf.one_hot(tf.cast(RATINGS - 1, tf.int64), 5)
    data = tf.data.Dataset.from_tensor_slices((features, ratings)).batch(30)
    return model.fit(data, epochs=4, verbose=0).history["loss"]


def dual_model(**options):
    layers = [
        de.keras.layers.SquashedEmbedding(
            8, initializer=keras.initializers.RandomNormal(0.0, 0.5), name=name, **options
        )
        for name in ("user_embedding", "movie_embedding")
    ]
    return DualChannelsDeepModel(*layers)


def test_the_movielens_demo(tmp_path):
    start = initial_vectors(8, seed=3), initial_vectors(8, seed=4)
    reference = DualChannelsDeepModel(keras.layers.Embedding(40, 8), keras.layers.Embedding(40, 8))
    for layer, vectors in zip(
        (reference.user_embedding, reference.movie_embedding), start, strict=True
    ):
        layer.build()
        layer.set_weights([vectors])
    expected = fit_dual(reference, keras.optimizers.SGD(0.5), lambda ids: ids)

    model = dual_model()
    for layer, vectors in zip((model.user_embedding, model.movie_embedding), start, strict=True):
        layer.params.upsert(raw(np.arange(40)), vectors)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.5))
    check_same_losses(fit_dual(model, optimizer, raw), expected)

    model.save_weights(tmp_path / "model.weights.h5")
    exported = dual_model()
    build_dense_layers(exported)
    inputs = {"user_id": tf.constant(raw(USERS)), "movie_id": tf.constant(raw(MOVIES))}
    exported(inputs)
    exported.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(exported(inputs), model(inputs))


# 3. demo/amazon-video-games-keras-eager: FieldWiseEmbedding with a frequency policy, mean pooling,
#    a training loop that restricts the table.


class VideoGameDnn(keras.Model):
    def __init__(self, embed):
        super().__init__()
        self.embedding_layer = embed
        self.dnn = dense_layer(8, activation="relu")
        self.out = dense_layer(1, activation="sigmoid", use_bias=False)

    @tf.function(input_signature=[tf.TensorSpec(shape=(None, None), dtype=tf.int64)])
    def call(self, x):
        x = self.embedding_layer(x)
        x = tf.reshape(x, [-1, 3 * 4])
        return self.out(self.dnn(x))


class MeanByField(keras.layers.Layer):
    """The reference: the mean of dense vectors, field by field."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(40, 4)

    def call(self, rows):
        vectors = self.embedding(rows)
        fields = [tf.cast(rows % 3 == field, tf.float32)[..., tf.newaxis] for field in range(3)]
        means = [
            tf.math.divide_no_nan(tf.reduce_sum(vectors * f, 1), tf.reduce_sum(f, 1))
            for f in fields
        ]
        return tf.stack(means, axis=1)


FEATURES = numbers(90, 5, seed=72)
REVIEWS = labels([FEATURES])


def train_games(model, optimizer, ids, after_step=lambda: None):
    model.dnn.build([None, 12])
    model.out.build([None, 8])
    loss_fn = keras.losses.BinaryCrossentropy()
    losses = []
    for _ in range(3):
        for start in range(0, 90, 30):
            x = tf.constant(ids(FEATURES[start : start + 30]))
            y = REVIEWS[start : start + 30, np.newaxis]
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            losses.append(float(loss))
            after_step()
    return losses


def test_the_video_games_demo():
    vectors = initial_vectors(4, seed=5)
    reference = VideoGameDnn(MeanByField())
    reference.embedding_layer.embedding.build()
    reference.embedding_layer.embedding.set_weights([vectors])
    expected = train_games(reference, keras.optimizers.SGD(0.5), lambda ids: ids)

    def category(ids):  # of ids as `raw` makes them, the field of the row number
        return (tf.abs(ids) - 2**40) // 1_000_003 % 3

    model = VideoGameDnn(
        de.keras.layers.FieldWiseEmbedding(
            4,
            3,
            initializer=keras.initializers.RandomNormal(0.0, 0.05),
            restrict_policy=de.FrequencyRestrictPolicy,
            slot_map_fn=category,
            bp_v2=False,
            combiner="mean",
            name="video_embedding",
        )
    )
    model.embedding_store = model.embedding_layer.params
    model.embedding_store.upsert(raw(np.arange(40)), vectors)
    sizes = []

    def restrict():
        model.embedding_store.restrict(40, trigger=60)
        sizes.append(int(model.embedding_store.size()))

    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.5))
    check_same_losses(train_games(model, optimizer, raw, restrict), expected)
    assert set(sizes) == {40}

    # Smaller than the batch's ids: the most frequent rows stay.
    model.embedding_store.restrict(10)
    keys, _ = model.embedding_store.export()
    batches = [np.unique(FEATURES[start : start + 30]) for start in range(0, 90, 30)] * 3
    counts = np.bincount(np.concatenate(batches), minlength=40)
    kept = {int(raw(row)): counts[row] for row in range(40) if raw(row) in keys.numpy()}
    assert len(kept) == 10
    assert min(kept.values()) >= np.sort(counts)[-10]

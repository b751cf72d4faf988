"""DynembApplyPooledGradients, and when the optimizer uses it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from op_helpers import HYPER, export, lookup_sparse, make_table, ops, random_bags

import tf_dynemb as de

FORMS = ("uniform", "splits", "indices")


def rows_of(handle, dtype=tf.float32):
    keys, vectors, state, *_ = export(handle, dtype=dtype)
    order = np.argsort(np.asarray(keys))
    return [np.asarray(part)[order] for part in (keys, vectors, state)]


def assert_same_rows(a, b, dtype):
    for got, want in zip(rows_of(a, dtype), rows_of(b, dtype), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
def test_operator_sums_and_applies(combiner, dtype):
    dims = [4, 3, 8]
    rng = np.random.default_rng(5)
    tables = [[make_table(dim, dtype=dtype, random=True, seed=9) for dim in dims] for _ in range(2)]
    for both in tables:
        for handle, dim in zip(both, dims, strict=True):
            ops.dynemb_attach_state(handle, "adagrad", widths=[dim], inits=[0.1])
    common = {"hyper": HYPER, "optimizer": "adagrad", "state": "adagrad", "inits": [0.1]}
    for step in range(1, 6):
        num_bags = 7
        keys, bags, weights, upstream = [], [], [], []
        for i, dim in enumerate(dims):
            form, bag_of = random_bags(rng, FORMS[i % 3], num_bags, 30)
            ids = rng.integers(0, 40, len(bag_of))
            keys.append(tf.constant(ids, tf.int64))
            bags.append(form)
            weights.append(
                rng.uniform(0.5, 1, len(ids)).astype(np.float32) if i == 1 else np.zeros(0, "f4")
            )
            upstream.append(tf.constant(rng.normal(size=(num_bags, dim)), dtype))
        for at_once, handles in enumerate(tables):
            n = len(handles)
            _, rows, argmax = lookup_sparse(
                handles, keys, bags, [num_bags] * n, dims, weights,
                combiners=[combiner] * n, dtypes=[dtype] * n,
            )  # fmt: skip
            inputs = {
                "keys": keys,
                "rows": rows,
                "bags": bags,
                "weights": weights,
                "argmax": argmax,
                "grads": upstream,
                "combiners": [combiner] * n,
            }
            if at_once:
                ops.dynemb_apply_pooled_gradients(
                    handles=handles, step=tf.constant(step, tf.int64), **inputs, **common
                )
            else:
                unique, sums, unique_rows = ops.dynemb_lookup_sparse_grad(**inputs)
                ops.dynemb_apply_gradients(
                    handles=handles, keys=unique, rows=unique_rows, grads=sums,
                    step=tf.constant(step, tf.int64), distinct=True, **common,
                )  # fmt: skip
    for a, b in zip(*tables, strict=True):
        assert_same_rows(a, b, dtype)


def test_operator_checks_its_inputs():
    table, other = make_table(2), make_table(2, key=tf.int32)

    def apply(handles, **changes):
        n = len(handles)
        inputs = {
            "handles": handles,
            "keys": [tf.constant([1, 2], tf.int64)] * n,
            "rows": [tf.constant([0, 1], tf.uint32)] * n,
            "bags": [tf.constant(1, tf.int64)] * n,
            "weights": [np.zeros(0, "f4")] * n,
            "argmax": [tf.zeros([0, 2], tf.int32)] * n,
            "grads": [tf.ones([2, 2])] * n,
            "combiners": ["sum"] * n,
            "hyper": HYPER,
            "step": tf.constant(1, tf.int64),
            "optimizer": "sgd",
        }
        return ops.dynemb_apply_pooled_gradients(**{**inputs, **changes})

    invalid = tf.errors.InvalidArgumentError
    with pytest.raises(invalid, match="not the first task of this table"):
        apply([table, table])
    with pytest.raises(invalid, match="keys"):
        apply([other])
    with pytest.raises(invalid, match=r"grads\[0\] has shape"):
        apply([table], grads=[tf.ones([4])])
    with pytest.raises(invalid, match="columns"):
        apply([table], grads=[tf.ones([2, 3])])
    with pytest.raises(invalid, match=r"rows\[0\]"):
        apply([table], rows=[tf.zeros([3], tf.uint32)])
    with pytest.raises(invalid, match=r"bags\[0\]"):
        apply([table], bags=[tf.constant([0, 1], tf.int64)])
    with pytest.raises(invalid, match="hyper"):
        apply([table], hyper=HYPER[:3])
    with pytest.raises(tf.errors.FailedPreconditionError, match="state"):
        apply([table], optimizer="adam")
    with pytest.raises(invalid, match="entries"):
        apply([table], combiners=["sum", "sum"])
    apply([table])


class Training:
    """Two tables, a layer on top, and steps of an optimizer, eager or in a `tf.function`."""

    def __init__(self, make_optimizer, *, constraint=None, dim=8, features=2):
        options = {
            "initializer": keras.initializers.RandomUniform(seed=3),
            "constraint": constraint,
        }
        self.tables = [de.DynamicVariable(dim, name=f"t{i}", **options) for i in range(2)]
        self.looked_up = [self.tables[i % 2] for i in range(features)]
        self.dense = tf.Variable(tf.ones([dim, 1]))
        self.optimizer = de.OptimizerWrapper(make_optimizer())
        self.change = lambda grads: grads

    def step(self, batch):
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(self.looked_up, list(batch), combiners="mean")
            loss = tf.reduce_mean(tf.square(tf.add_n(pooled) @ self.dense - 1.0))
        variables = [*self.tables, self.dense]
        grads = self.change(tape.gradient(loss, variables))
        self.optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    def batches(self, n):
        rng = np.random.default_rng(7)
        for _ in range(n):
            yield [
                tf.constant(rng.integers(0, 60, (16, 3)), tf.int64)
                for _ in range(len(self.looked_up))
            ]

    def operators(self):
        """Returns the operators of a traced step, without those that TensorFlow prunes."""
        signature = [tf.TensorSpec([None, 3], tf.int64)] * len(self.looked_up)
        graph = tf.function(self.step).get_concrete_function(signature).graph
        kept = tf.compat.v1.graph_util.extract_sub_graph(
            graph.as_graph_def(), [op.name for op in graph.control_outputs]
        )
        return {node.op for node in kept.node}


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "rowwise": lambda: de.RowwiseAdagrad(0.1),
}


def assert_trains_alike(make_training):
    """A `tf.function` gives the rows of eager steps, which sum first."""
    eager, traced = make_training(), make_training()
    step = tf.function(traced.step)
    for batch in eager.batches(6):
        eager.step(batch)
        step(batch)
    for a, b in zip(eager.tables, traced.tables, strict=True):
        keys = np.sort(np.asarray(de.export(a)[0]))
        np.testing.assert_array_equal(keys, np.sort(np.asarray(de.export(b)[0])))
        np.testing.assert_array_equal(a.lookup(keys, insert=False), b.lookup(keys, insert=False))
    np.testing.assert_array_equal(eager.dense, traced.dense)
    return make_training().operators()


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_traced_step_sums_and_applies_at_once(optimizer):
    used = assert_trains_alike(lambda: Training(OPTIMIZERS[optimizer]))
    assert "DynembApplyPooledGradients" in used
    assert not {"DynembLookupSparseGrad", "DynembApplyGradients"} & used


def with_norm(training):
    training.change = lambda grads: (tf.print(tf.linalg.global_norm(grads)), grads)[1]
    return training


def with_factor(training):
    training.change = lambda grads: [
        tf.IndexedSlices(2.0 * g.values, g.indices) if isinstance(g, tf.IndexedSlices) else g
        for g in grads
    ]
    return training


@pytest.mark.parametrize(
    "make",
    [
        lambda: Training(lambda: keras.optimizers.SGD(0.1, clipnorm=0.01)),
        lambda: Training(lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01)),
        lambda: Training(lambda: keras.optimizers.SGD(0.1, loss_scale_factor=2.0)),
        lambda: Training(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
        lambda: Training(lambda: keras.optimizers.SGD(0.1, use_ema=True)),
        lambda: Training(OPTIMIZERS["sgd"], constraint=keras.constraints.NonNeg()),
        lambda: Training(OPTIMIZERS["sgd"], features=4),  # two lookups in each table
        lambda: with_norm(Training(OPTIMIZERS["sgd"])),
        lambda: with_factor(Training(OPTIMIZERS["sgd"])),
    ],
    ids=["clipnorm", "global", "scale", "accumulation", "ema", "constraint", "shared", "read",
         "changed"],
)  # fmt: skip
def test_gradients_that_are_needed_are_summed(make):
    used = assert_trains_alike(make)
    assert "DynembApplyPooledGradients" not in used


def test_keras_models_train():
    """`model.fit`, with a separate lookup for each layer."""

    def train(run_eagerly):
        keras.utils.set_random_seed(4)
        inputs = {name: keras.Input([], dtype="int64", name=name) for name in ("user", "item")}
        vectors = [
            de.layers.Embedding(8, embeddings_initializer="ones", name=f"of_{name}")(each)
            for name, each in inputs.items()
        ]
        outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(vectors))
        model = keras.Model(inputs, outputs)
        model.compile(
            de.OptimizerWrapper(keras.optimizers.Adagrad(0.1)), "mse", run_eagerly=run_eagerly
        )
        rng = np.random.default_rng(8)
        x = {name: rng.integers(0, 50, 256) for name in inputs}
        model.fit(x, rng.normal(size=256), batch_size=32, epochs=2, verbose=0, shuffle=False)
        return model.predict(x, verbose=0)

    np.testing.assert_allclose(train(False), train(True), rtol=1e-5, atol=1e-6)

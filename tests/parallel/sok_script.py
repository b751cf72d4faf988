"""A training script for SOK v2, in the style of its documentation; one line of it is changed.

It trains two dynamic tables, a static one and a dense layer on shares of batches, and compares the
result with numpy: `horovodrun -np N python sok_script.py FOLDER`.
"""

import json
import os
import sys
import time
from datetime import datetime

import horovod.tensorflow as hvd
import numpy as np
import pytz
import tensorflow as tf

import tf_dynemb as sok  # the changed line: import sparse_operation_kit as sok

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
sok.init()

BATCH, STEPS, DIM, ROWS, RATE = 16, 8, 4, 10, 2e-4
FOLDER = sys.argv[1]

v1 = sok.DynamicVariable(
    dimension=DIM,
    var_type="hybrid",
    initializer="uniform",
    init_capacity=1024,
    max_capacity=64 * 1024,
    max_hbm_for_vectors=2,
)
v2 = sok.DynamicVariable(
    dimension=DIM, var_type="hybrid", initializer="13", init_capacity=1024, max_capacity=64 * 1024
)
v3 = sok.Variable(np.arange(ROWS * DIM).reshape(ROWS, DIM) / 10, dtype=tf.float32)
layer = tf.keras.layers.Dense(1, use_bias=True, kernel_initializer="ones")
layer.build((None, 3 * DIM))

sok_vars, other_vars = sok.filter_variables([v1, v2, v3, *layer.trainable_variables])
assert [id(v) for v in sok_vars] == [id(v) for v in (v1, v2, v3)]
assert len(other_vars) == 2
embedding_variables, plain_variables = sok.filter_variables(
    [
        tf.Variable([[0, 1, 2]]),
        sok.Variable([[3, 4, 5]]),
        sok.Variable([[6, 7]], mode="localized:0"),
    ]
)
assert (len(embedding_variables), len(plain_variables)) == (2, 1)

optimizer = tf.keras.optimizers.SGD(learning_rate=RATE)
sok_optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(learning_rate=RATE))
adam = sok.OptimizerWrapper(tf.keras.optimizers.Adam(learning_rate=RATE))


@tf.function(reduce_retracing=True)
def train_step(indices, labels, sok_optimizer):
    with tf.GradientTape() as tape:
        embeddings = sok.lookup_sparse(sok_vars, indices, combiners=["sum", "mean", "sum"])
        logits = layer(tf.concat(embeddings, axis=1))
        loss = tf.reduce_mean(tf.square(logits[:, 0] - labels))
    sok_grads, other_grads = tape.gradient(loss, [sok_vars, other_vars])
    sok_optimizer.apply_gradients(zip(sok_grads, sok_vars))  # noqa: B905
    other_grads = [hvd.allreduce(grad, op=hvd.Average) for grad in other_grads]
    optimizer.apply_gradients(zip(other_grads, other_vars))  # noqa: B905
    return hvd.allreduce(loss, op=hvd.Average)


class Model:
    """The same model in numpy, trained on the batches of all ranks."""

    def __init__(self, start):
        self.tables = [dict(start), {}, dict(enumerate(v3_start))]
        self.kernel, self.bias = np.ones(3 * DIM), 0.0

    def rows(self, table, key):
        return self.tables[table].setdefault(key, np.full(DIM, 13.0))

    def step(self, indices, labels):
        pooled = np.zeros((BATCH, 3, DIM))
        for t, bags in enumerate(indices):
            for b, keys in enumerate(bags):
                for key in keys:
                    pooled[b, t] += self.rows(t, key) / (len(keys) if t == 1 else 1)
        x = pooled.reshape(BATCH, 3 * DIM)
        error = x @ self.kernel + self.bias - labels
        upstream = (2 * error[:, None] / BATCH * self.kernel).reshape(BATCH, 3, DIM)
        sums = [{}, {}, {}]
        for t, bags in enumerate(indices):
            for b, keys in enumerate(bags):
                for key in keys:
                    part = upstream[b, t] / (len(keys) if t == 1 else 1)
                    sums[t][key] = sums[t].get(key, 0) + part
        for t in range(3):
            for key, grad in sums[t].items():
                self.tables[t][key] = self.rows(t, key) - RATE * grad
        self.kernel = self.kernel - RATE * 2 / BATCH * (error @ x)
        self.bias -= RATE * 2 * error.mean()
        return np.square(error).mean()


def gather(rows):
    return np.concatenate([np.asarray(part) for part in hvd.allgather_object(np.asarray(rows))])


def held(variable):
    """Returns the keys and vectors on all ranks."""
    keys, values = sok.export(variable)
    return dict(zip(gather(keys).tolist(), gather(values), strict=True))


rng = np.random.default_rng(0)
v3_start = np.arange(ROWS * DIM).reshape(ROWS, DIM) / 10
every = np.arange(30, dtype=np.int64)
tf.nn.embedding_lookup(v1, every)
model = Model(held(v1))
share = BATCH // hvd.size()
rank_slice = slice(hvd.rank() * share, (hvd.rank() + 1) * share)

moments, seen = [], []
for _ in range(STEPS):
    indices = [
        [rng.integers(0, keys, rng.integers(1, 4)).tolist() for _ in range(BATCH)]
        for keys in (30, 40, ROWS)
    ]
    labels = rng.normal(size=BATCH).astype(np.float32)
    moments.append(min(hvd.allgather_object(datetime.now(pytz.utc))))
    time.sleep(0.02)
    ragged = [tf.ragged.constant(bags[rank_slice], dtype=tf.int64) for bags in indices]
    batch = [ragged[0], ragged[1].to_sparse(), ragged[2]], tf.constant(labels[rank_slice])
    loss = train_step(*batch, sok_optimizer)
    seen.append([set(sum(bags, [])) for bags in indices[:2]])  # noqa: RUF017
    np.testing.assert_allclose(loss, model.step(indices, labels), rtol=1e-4)
    time.sleep(0.02)

for t, variable in enumerate((v1, v2)):
    values = held(variable)
    assert set(values) == set(model.tables[t])
    for key, value in values.items():
        np.testing.assert_allclose(value, model.tables[t][key], rtol=1e-3, atol=1e-4)
v3_end = np.array([model.tables[2][row] for row in range(ROWS)])
np.testing.assert_allclose(v3.numpy(), v3_end[hvd.rank() :: hvd.size()], rtol=1e-3, atol=1e-4)
np.testing.assert_allclose(layer.kernel[:, 0], model.kernel, rtol=1e-3, atol=1e-4)

# The rows that were updated since the last steps began.
keys, values = sok.incremental_model_dump([v1, v2], moments[-2])
for t in range(2):
    assert set(keys[t].tolist()) == seen[-1][t] | seen[-2][t]
    for key, value in zip(keys[t].tolist(), values[t], strict=True):
        np.testing.assert_allclose(value, model.tables[t][key], rtol=1e-3, atol=1e-4)

path = os.path.join(FOLDER, "weights")
before = [held(v) for v in (v1, v2)]
v3_value = v3.numpy()
sok.dump(path, sok_vars, sok_optimizer)
for variable in (v1, v2):
    exported_keys, exported_values = sok.export(variable)
    sok.assign(variable, exported_keys, tf.zeros(exported_values.shape))
    assert not np.any(list(held(variable).values()))
    assert variable.size[1] == DIM
v3.assign(tf.zeros_like(v3))
sok.load(path, sok_vars, sok_optimizer)
for variable, rows in zip((v1, v2), before, strict=True):
    after = held(variable)
    assert set(after) == set(rows)
    assert all((after[key] == rows[key]).all() for key in rows)
np.testing.assert_array_equal(v3.numpy(), v3_value)

# A step after a load equals the step after the dump: moments and number of steps are loaded.
adam_step = tf.function(train_step.python_function)
adam_step(*batch, adam)
sok.dump(path, sok_vars, adam)
weights = layer.get_weights()
ends = []
for _ in range(2):
    adam_step(*batch, adam)
    ends.append([held(v1), held(v2)])
    layer.set_weights(weights)
    sok.load(path, sok_vars, adam)
for once, again in zip(*ends, strict=True):
    assert set(once) == set(again)
    for key, value in once.items():
        np.testing.assert_allclose(value, again[key], rtol=1e-5, atol=1e-7)
assert int(adam.iterations) == 1

with open(os.path.join(FOLDER, f"result.{hvd.rank()}.json"), "w") as file:
    json.dump({"loss": float(loss), "rows": [len(rows) for rows in before]}, file)

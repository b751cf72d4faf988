"""Uses tables under tf.distribute on two logical CPUs, in a separate process (test_distribute.py).

Prints a JSON object: the error of each call, or null.
"""

import json

import keras
import numpy as np
import tensorflow as tf

import tf_dynemb as de

IDS, LABELS = np.array([[1, 2], [3, 1]]), np.array([[1.0], [0.0]])


def model():
    layers = [de.layers.Embedding(2, initializer="ones"), keras.layers.Flatten()]
    made = keras.Sequential([keras.Input((2,), dtype="int64"), *layers, keras.layers.Dense(1)])
    made.compile(de.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    return made


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


def main():
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    table = de.DynamicVariable(2, "ones")
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.1))
    ids = tf.constant([1, 2], tf.int64)
    gradient = tf.IndexedSlices(tf.ones([2, 2]), ids)
    calls = {
        "lookup": lambda: table.lookup(ids, insert=False),
        "embedding_lookup": lambda: tf.nn.embedding_lookup(table, ids),
        "lookup_sparse": lambda: de.lookup_sparse(table, ids[:, tf.newaxis], combiners="sum"),
        "optimizer": lambda: optimizer.apply_gradients([(gradient, table)]),
    }
    errors = {}
    with mirrored.scope():
        errors["table"] = error_of(lambda: de.DynamicVariable(2))
        errors["model"] = error_of(model)
    for name, call in calls.items():
        errors[name] = error_of(lambda call=call: mirrored.run(tf.function(call)))
    for one in (
        tf.distribute.MirroredStrategy(["CPU:0"]),
        tf.distribute.OneDeviceStrategy("CPU:0"),
    ):
        with one.scope():
            trained = model()
        losses = trained.fit(IDS, LABELS, epochs=3, verbose=0).history["loss"]
        errors[type(one).__name__] = None if losses[-1] < losses[0] else f"losses {losses}"
    print(json.dumps(errors))


if __name__ == "__main__":
    main()

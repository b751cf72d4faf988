"""Writes golden/tfra, a small training of TFRA as its users save it.

TFRA needs its own venv:

    pip install tensorflow-cpu==2.16.2 tf-keras==2.16.0 tensorflow-recommenders-addons==0.8.1
    TF_USE_LEGACY_KERAS=1 python make_tfra.py OUT
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

out = sys.argv[1]
IDS = np.array([[3, -7], [2**40 + 1, 3], [11, 12]])


def train(optimizer, saver, devices=None):
    layer = de.keras.layers.Embedding(
        4,
        initializer=tf.keras.initializers.RandomNormal(0.0, 0.5, seed=1),
        name="user",
        devices=devices,
        kv_creator=de.CuckooHashTableCreator(saver=saver),
    )
    optimizer = de.DynamicEmbeddingOptimizer(optimizer)
    for step in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(IDS[: step + 1])) ** 2)
        grads = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(grads, layer.trainable_variables, strict=True))
    layer.params.upsert(tf.constant([99], tf.int64), tf.ones([1, 4]))  # a row without state
    return layer, optimizer


def slots(layer):
    found = layer.optimizer_vars
    return found.as_list() if hasattr(found, "as_list") else list(found)


def content(variable):
    keys, values = variable.export()
    order = np.argsort(keys.numpy())
    return keys.numpy()[order].tolist(), values.numpy()[order].astype(float).tolist()


expected = {}
os.makedirs(out, exist_ok=True)
Adam = tf.keras.optimizers.Adam
legacy = tf.keras.optimizers.legacy
for name, optimizer, with_files, devices in [
    ("adam", Adam(0.1), False, None),
    ("legacy_adam", legacy.Adam(0.1), False, ["/CPU:0", "/CPU:0"]),
    ("adagrad_files", tf.keras.optimizers.Adagrad(0.1), None, None),
    ("saver", Adam(0.1), True, ["/CPU:0", "/CPU:0"]),
]:
    tf.keras.backend.clear_session()
    saver = de.FileSystemSaver() if with_files else None
    layer, wrapped = train(optimizer, saver, devices)
    path = os.path.join(out, name)
    if with_files is None:
        layer.params.save_to_file_system(path)
        for slot in slots(layer):
            slot.save_to_file_system(path)
    else:
        tf.train.Checkpoint(layer=layer, optimizer=wrapped).write(os.path.join(path, "checkpoint"))
    expected[name] = {"user-parameter": content(layer.params)}
    for slot in slots(layer):
        expected[name][slot.name] = content(slot)
    print(name, list(expected[name]))
with open(os.path.join(out, "expected.json"), "w") as file:
    json.dump(expected, file)

# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first model
#
# This notebook trains a small model that predicts clicks. Its embeddings are hash tables: any
# 64-bit integer is an id, and an id gets a row when training first sees it. You will train the
# model, look at its tables, write them to disk, and read them back with numpy.
#
# TensorFlow prints some lines about the machine when it is imported. They are no errors.

# %%
import tempfile
from pathlib import Path

import keras
import numpy as np

import tf_dynemb as de

keras.utils.set_random_seed(1)

# %% [markdown]
# **The clicks.** A click has a user, an item, and a label: 1 if the user has clicked. Ids are
# numbers as they come from a log, without a range and without gaps to fill. Here they are random,
# and each user and item has a hidden taste that decides about the clicks.

# %%
rng = np.random.default_rng(0)
user_ids, item_ids = rng.integers(-(2**63), 2**63, size=(2, 400))
user_tastes, item_tastes = rng.normal(size=(2, 400, 2))


def clicks(count, items=350):
    """Draws clicks on the first items: the ids, and the labels."""
    user, item = rng.integers(0, 400, count), rng.integers(0, items, count)
    odds = 2 * (user_tastes[user] * item_tastes[item]).sum(axis=1)
    labels = rng.random(count) < 1 / (1 + np.exp(-odds))
    return {"user": user_ids[user], "item": item_ids[item]}, labels.astype(np.float32)


train, train_labels = clicks(40_000)
print(train["user"][:3], train["item"][:3], train_labels[:3])

# %% [markdown]
# **The model.** `de.layers.Embedding(8)` takes the place of `keras.layers.Embedding(vocabulary,
# 8)`: there is no vocabulary. The vectors of the user and of the item go through a small network.

# %%
user = keras.Input((1,), dtype="int64", name="user")
item = keras.Input((1,), dtype="int64", name="item")
users = de.layers.Embedding(8, initializer="normal", name="users")
items = de.layers.Embedding(8, initializer="normal", name="items")
product = keras.layers.Flatten()(users(user) * items(item))
click = keras.layers.Dense(1, activation="sigmoid", name="click")(product)
model = keras.Model({"user": user, "item": item}, click)

# %% [markdown]
# **Training.** `de.OptimizerWrapper` lets a Keras optimizer train tables together with the other
# weights. The rest is plain Keras.

# %%
optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.02))
model.compile(optimizer, "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
history = model.fit(train, train_labels, batch_size=256, epochs=4, verbose=2)

# %% [markdown]
# **Evaluation.** These clicks also have 50 items that the training has not seen. Evaluation
# creates no rows: an id without a row reads as a vector that does not depend on the training.

# %%
rows_before = len(items.table)
test, test_labels = clicks(10_000, items=400)
loss, auc = model.evaluate(test, test_labels, batch_size=1000, verbose=0)
print(f"AUC {auc:.3f}; {len(items.table)} rows of items, as before: {rows_before}")

# %% [markdown]
# **The table.** At the end of a cell, a table shows how many rows it has, and what they take in
# memory.

# %%
users.table

# %% [markdown]
# **Vectors.** The ids are the keys of the table. `contains` says which ids have a row. The vector
# of the one that has none is the one that it would start with.

# %%
known, unknown = user_ids[0], 12345
print(users.table.contains([known, unknown]).numpy())
print(users.table.peek([known, unknown]).numpy().round(3))

# %% [markdown]
# **A dump.** `de.dump` writes all rows, the other weights and the state of the optimizer, as of
# one moment. The result says which moment that was. (The folder of this notebook is removed at
# its end.)

# %%
folder = tempfile.TemporaryDirectory(prefix="first_model_")
path = Path(folder.name, "model")
de.dump(path, model, optimizer=optimizer)

# %% [markdown]
# **The files.** A dump is a folder of numpy files, one for each column of a table.
# `MANIFEST.json` describes them. The other weights are in safetensors files. Later dumps of
# changes only (deltas) become folders beside this one.

# %%
for file in sorted(path.rglob("*.*")):
    print(f"{file.stat().st_size:9,} bytes  {file.relative_to(path)}")

# %% [markdown]
# What is at a path can be opened without TensorFlow, and shown.

# %%
chain = de.storage.Chain.open(path)
chain

# %% [markdown]
# **Reading with numpy.** `column` maps a file into memory as an array, without reading all of it.
# `keys[i]` is the key of the vector `vectors[i]`.

# %%
keys = chain.base.column("users/embeddings", "keys")
vectors = chain.base.column("users/embeddings", "vectors")
print(keys.shape, vectors.shape)
assert np.array_equal(vectors[keys == known][0], users.table.peek(known))

# %% [markdown]
# **Looking up with numpy.** A `Reader` finds the vectors of ids by the index that is in the dump.
# It runs where TensorFlow is not installed, such as in a small service.

# %%
reader = de.serving.Reader(path)
reader

# %% [markdown]
# `reader.dense()` has the other weights, by name. With them, numpy alone predicts what the model
# predicts.

# %%
weights = reader.dense()
product = reader.lookup(test["user"], "users/embeddings") * reader.lookup(
    test["item"], "items/embeddings"
)
odds = product @ weights["click/kernel"] + weights["click/bias"]
by_numpy = 1 / (1 + np.exp(-odds))
by_model = model.predict(test, batch_size=1000, verbose=0)
print(f"largest difference: {np.abs(by_numpy - by_model).max():.1e}")
assert np.allclose(by_numpy, by_model, atol=1e-5)

# %% [markdown]
# **Clean up.** This removes the folder. [online_loop](online_loop.ipynb) continues with a model
# that trains and is served at the same time. [what_stays](what_stays.ipynb) limits tables.

# %%
folder.cleanup()

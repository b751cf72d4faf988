# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train, publish, follow
#
# A model that trains on the clicks of the last minutes is only worth it if predictions change as
# fast. This notebook trains a model without end, publishes what has changed, and follows it:
# first with numpy, then with a SavedModel. [first_model](first_model.ipynb) comes before it.

# %%
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tf_dynemb as de

keras.utils.set_random_seed(1)
folder = tempfile.TemporaryDirectory(prefix="online_loop_")
published = Path(folder.name, "published")

# %% [markdown]
# **News.** The clicks are on articles. One in ten views is a click. Each hour brings ten new
# articles. From hour 3 on, the first article is breaking news: eight in ten views are clicks.

# %%
rng = np.random.default_rng(0)
articles = rng.integers(-(2**63), 2**63, 200)
breaking = articles[0]


def clicks_of(hour):
    """Draws the views of an hour: the articles [4000, 1], and 1 for each click."""
    viewed = rng.choice(articles[: 100 + 10 * hour], (4000, 1))
    rates = np.where((viewed == breaking) & (hour >= 3), 0.8, 0.1)
    return viewed, (rng.random((4000, 1)) < rates).astype(np.float32)


def batches():
    """Yields batches for ever, 20 in each hour."""
    hour = 0
    while True:
        viewed, labels = clicks_of(hour)
        yield from zip(np.split(viewed, 20), np.split(labels, 20), strict=True)
        hour += 1


# %% [markdown]
# **The model** predicts how likely a click on an article is, from the article's vector.

# %%
model = keras.Sequential(
    [
        keras.Input((1,), dtype="int64"),
        de.layers.Embedding(8, initializer="normal", name="articles"),
        keras.layers.Flatten(),
        keras.layers.Dense(1, activation="sigmoid", name="click"),
    ]
)
optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.05))
model.compile(optimizer, "binary_crossentropy")

# %% [markdown]
# **A service** predicts with numpy alone: a `Reader` has the vectors and the other weights of
# what was published, as of one moment. `follow` takes what was published since. Usually, a
# service is another process, and calls it in a loop. Here it is called after each epoch, which is
# an hour of clicks, and notes what it predicts for the breaking news.


# %%
class Service(keras.callbacks.Callback):
    """Follows what is published, and predicts."""

    reader = None

    def on_epoch_end(self, epoch, logs=None):
        self.reader = self.reader or de.serving.Reader(published)
        self.reader.follow()
        rows, predicted = self.reader.size(), self.predict(breaking)
        print(f"hour {epoch}: {rows} rows, breaking news {predicted:.2f}")

    def predict(self, article):
        weights = self.reader.dense()
        odds = self.reader.lookup(article) @ weights["click/kernel"] + weights["click/bias"]
        return float(1 / (1 + np.exp(-odds[0])))


# %% [markdown]
# **Training.** The callback `Publish` writes a base with all rows, here still none, when `fit`
# begins, and then, here at the end of each epoch, a delta with the rows that have changed. The
# prediction follows the news within the hour. New articles have rows as soon as there are clicks
# on them.

# %%
publish, service = de.callbacks.Publish(published), Service()
history = model.fit(
    batches(), steps_per_epoch=20, epochs=6, verbose=0, callbacks=[publish, service]
)

# %% [markdown]
# **What was published.** A chain is a base and its deltas. Each of them appears as a whole, or
# not at all, even if the trainer is killed while it writes. `tf-dynemb inspect PATH` lists them.

# %%
de.storage.Chain.open(published)

# %% [markdown]
# **A SavedModel that follows.** Where TensorFlow serves, the model is exported once, with the
# path that it is to follow. The loaded model looks there several times a second, in a thread.

# %%
exported = Path(folder.name, "exported")
de.export_saved_model(model, exported, "link", published, follow=published, follow_seconds=0.05)
served = tf.saved_model.load(exported)

# %% [markdown]
# Now the news is over: nobody clicks on it any more. `incremental_dump` publishes what `Publish`
# does, without `fit`, and returns the watermark of the delta: the moment that it is of.

# %%
question = np.array([[breaking]])
print(f"before: {served.serve(question)[0, 0]:.2f}")
for _ in range(20):
    model.train_on_batch(np.full((50, 1), breaking), np.zeros((50, 1)))
mark = de.incremental_dump(published, model, optimizer=optimizer)
mark

# %% [markdown]
# `served.watermark()` says which moment the loaded model has. When it has the one of the delta,
# it predicts what the trained model predicts.

# %%
while served.watermark()["watermark"] < mark.tick:
    time.sleep(0.05)
answer = served.serve(question)
print(f"after: {answer[0, 0]:.2f}")
assert np.array_equal(answer, model(question))

# %% [markdown]
# **A smaller copy.** The chain has the state of the optimizer, for training. `de.publish` copies
# what serving needs, here with vectors of 8 bits. Called again, it copies what has come since.

# %%
small = Path(folder.name, "small")
de.publish(small, from_=published, rows="int8")
de.storage.Chain.open(small)

# %% [markdown]
# **Going on.** A trainer that was stopped loads the rows, the other weights and the optimizer,
# and goes on with the next delta. The new model here is in this process; it could be in another.
# In `fit`, `Publish(..., resume=True)` does this by itself.

# %%
successor = keras.models.clone_model(model)
successor.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.05)), "binary_crossentropy")
de.load(published, successor, optimizer=successor.optimizer)
assert np.array_equal(successor(question), model(question))
successor.train_on_batch(*clicks_of(6))
de.incremental_dump(published, successor, optimizer=successor.optimizer)
print(f"{service.reader.follow()} deltas followed, {service.reader.size()} rows")

# %% [markdown]
# **Going back.** `publish.publications` has a watermark for each publication. `until` loads the
# state of then: here of hour 4, when the news was at its height.

# %%
hour_4 = publish.publications[5].watermark
de.load(published, successor, optimizer=successor.optimizer, until=hour_4)
print(f"in hour 4: {successor(question)[0, 0]:.2f}")

# %% [markdown]
# **Clean up.** This removes the folder. [serving](serving.ipynb) puts a server in front of such a
# model. `docs/online_learning.md` has the whole loop, and what each of its parts guarantees.

# %%
del served  # it follows until then
folder.cleanup()

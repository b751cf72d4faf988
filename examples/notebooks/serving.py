# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A server that follows
#
# This notebook exports a model with small rows, starts the server `python -m tf_dynemb.serve` for
# it, and asks it over REST. While it answers, training goes on, and the server follows. Each
# answer says of which moment it is. In a checkout, `make develop` has installed what the server
# needs; elsewhere, `pip install 'tf_dynemb[serve]'` does.

# %%
import atexit
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import keras
import numpy as np

import tf_dynemb as de

keras.utils.set_random_seed(1)
folder = tempfile.TemporaryDirectory(prefix="serving_")
models, published = Path(folder.name, "models"), Path(folder.name, "published")

# %% [markdown]
# **A model** of users and items, as in [first_model](first_model.ipynb). Users 0 to 999 click on
# items of the same parity: even users on even items, odd ones on odd items.

# %%
user = keras.Input((1,), dtype="int64", name="user")
item = keras.Input((1,), dtype="int64", name="item")
users = de.layers.Embedding(16, initializer="normal", name="users")
items = de.layers.Embedding(16, initializer="normal", name="items")
product = keras.layers.Flatten()(users(user) * items(item))
click = keras.layers.Dense(1, activation="sigmoid", name="click")(product)
model = keras.Model({"user": user, "item": item}, click)
optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.02))
model.compile(optimizer, "binary_crossentropy")

rng = np.random.default_rng(0)
ids = {"user": rng.integers(0, 1000, 20_000), "item": rng.integers(0, 1000, 20_000)}
labels = (ids["user"] % 2 == ids["item"] % 2).astype(np.float32)
history = model.fit(ids, labels, batch_size=200, epochs=2, verbose=2)

# %% [markdown]
# **Publish and export.** `dump` publishes a base at a path. The export is version 1 of the model
# `ctr`. It has the rows of that base, with a byte for each element of a vector, and follows what
# comes at the path.

# %%
base = de.dump(published, model, optimizer=optimizer)
de.export_saved_model(model, models / "ctr" / "1", dump=published, rows="int8", follow=published)

# %% [markdown]
# The rows of the export are a dump in it, without the state of the optimizer. (A delta that comes
# later has the format that it was published in, here float32.)

# %%
de.storage.Chain.open(models / "ctr" / "1" / "assets.extra" / "tf_dynemb")

# %% [markdown]
# **Start the server.** It is a process beside this one. It chooses a free port, and its log says
# which. (`atexit` ends it with the notebook, whatever happens.)

# %%
log = Path(folder.name, "log")
command = [sys.executable, "-m", "tf_dynemb.serve", f"--model=ctr={models / 'ctr'}"]
command += ["--http-port=0", "--grpc-port=-1", "--drain-seconds=0"]
with log.open("w") as file:
    server = subprocess.Popen(command, stderr=file)
atexit.register(server.kill)

while not (found := re.search(r"REST on (http\S+),", log.read_text())):
    assert server.poll() is None, log.read_text()
    time.sleep(0.1)
url = found[1]
print(url)

# %% [markdown]
# **Ask it.** A request has a list of instances, each with the inputs of the model by name. The
# answer has a prediction for each of them. The watermark of the answer, in its headers, is the
# moment of the model that gave it.


# %%
def ask(*pairs, **headers):
    """Sends users and items; returns the predictions, and the watermark."""
    instances = [{"user": [user], "item": [item]} for user, item in pairs]
    request = urllib.request.Request(
        f"{url}/v1/models/ctr:predict", json.dumps({"instances": instances}).encode(), headers
    )
    with urllib.request.urlopen(request) as answer:
        predictions = [round(each[0], 2) for each in json.load(answer)["predictions"]]
        return predictions, int(answer.headers["x-watermark"])


print(ask((2, 4), (2, 5), (3, 4), (3, 5)), "base:", base.tick)

# %% [markdown]
# An id that training has not seen is no error: its vector is the one that a new row would have.

# %%
ask((2, 4), (123456789, 4))

# %% [markdown]
# **A delta arrives.** User 7 now clicks on even items, too. `incremental_dump` publishes the rows
# that this has changed.

# %%
even = np.arange(0, 1000, 2)
model.fit({"user": np.full(500, 7), "item": even}, np.ones(500), epochs=10, verbose=0)
delta = de.incremental_dump(published, model, optimizer=optimizer)
delta

# %% [markdown]
# The server has it a moment later. The watermark of the answers shows when.

# %%
predictions, watermark = ask((7, 4), (2, 4))
while watermark < delta.tick:
    print(predictions, "watermark", watermark)
    time.sleep(0.1)
    predictions, watermark = ask((7, 4), (2, 4))
print(predictions, "watermark", watermark)

# %% [markdown]
# A client that must not get an older answer says so: a model that is older than `x-min-watermark`
# answers 412.

# %%
print(ask((7, 4), **{"x-min-watermark": str(delta.tick)}))
try:
    ask((7, 4), **{"x-min-watermark": str(delta.tick + 1)})
except urllib.error.HTTPError as error:
    print(error.code, json.load(error))

# %% [markdown]
# **The state of the model**: the version, the watermark, and the error of what could not be
# followed (here none).

# %%
with urllib.request.urlopen(f"{url}/v1/models/ctr") as answer:
    print(json.dumps(json.load(answer), indent=1))

# %% [markdown]
# **Stop it.** With SIGTERM the server ends what it has begun, and exits with 0.

# %%
server.terminate()
print("exit code", server.wait(timeout=60))
atexit.unregister(server.kill)
folder.cleanup()

# %% [markdown]
# `docs/server.md` has the protocols, the options and the limits, and `docs/deploying.md`
# containers and Kubernetes.

# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What stays in a table
#
# Ids come and go, and a table would grow for ever. This notebook shows the ways to limit it: a
# maximum of rows and what a full table evicts, rows that expire, and admission, which keeps rare
# ids from getting a row. The tables are small, so that each plot can show all of their keys.

# %%
import datetime
import itertools

import matplotlib.pyplot as plt
import numpy as np

import tf_dynemb as de

# %% [markdown]
# **Plots.** A line of a plot is a table, or a moment. A dark field is a key that has a row.


# %%
def show(rows, title, xlabel="key"):
    """Draws which keys have a row: for each name, an array of bools."""
    _, axes = plt.subplots(figsize=(8, 0.6 + 0.3 * len(rows)))
    axes.pcolormesh(np.array(list(rows.values())), cmap="Blues", vmax=1.2, ec="white", lw=0.5)
    axes.set(title=title, xlabel=xlabel, yticks=np.arange(len(rows)) + 0.5)
    axes.set_yticklabels(rows)
    axes.invert_yaxis()
    plt.show()


# %% [markdown]
# **Traffic.** The lookups of a training, a batch of ids at a time. Keys 0 to 9 are popular in the
# first 20 batches, and then they are over. Each of the keys 10 to 19 comes in every tenth batch,
# all the time. The keys from 20 on come once, three in each batch.

# %%
once = itertools.count(20)
batches = []
for step in range(40):
    popular = list(range(10)) * 2 if step < 20 else []
    steady = [10 + step % 10] * 3
    batches.append([*popular, *steady, *itertools.islice(once, 3)])

# %% [markdown]
# **A full table.** `max_capacity` is the most rows that a table has. When it is full, a new key
# takes the row of another one; `evict_strategy` says of which. `"lru"` evicts what was not used
# for the longest time, `"lfu"` what was asked for least often, and `"epoch_lfu"` the same, but
# among the keys that were not asked for in the latest epochs, here of 10 batches.

# %%
tables = {
    strategy: de.DynamicVariable(
        4, name=strategy, max_capacity=20, evict_strategy=strategy, **options
    )
    for strategy, options in {"lru": {}, "lfu": {}, "epoch_lfu": {"epoch_steps": 10}}.items()
}
for batch in batches:
    for table in tables.values():
        table.lookup(batch)
kept = {strategy: table.contains(range(140)).numpy() for strategy, table in tables.items()}
show(kept, "20 rows after 40 batches")

# %% [markdown]
# `"lru"` keeps whatever came last, most of it keys that never come again, and only half of the
# steady ones. `"lfu"` keeps the keys that were popular once. `"epoch_lfu"` has let those go, and
# has all steady keys. A table shows what it has evicted.

# %%
tables["epoch_lfu"]

# %% [markdown]
# **Scores.** With the strategy `"score"` you say what a row is worth: the row with the lowest
# score goes first. Here key k has the score 100 - k, and key 40 gets a higher one.

# %%
table = de.DynamicVariable(4, max_capacity=10, evict_strategy="score")
for key in range(50):
    table.lookup([key], scores=[100 - key])
    if key == 40:
        table.set_scores([40], [1000])
show({"score": table.contains(range(60)).numpy()}, "10 rows after 50 keys")
print(table.scores([0, 40, 45]).numpy(), "(-1: no row)")

# %% [markdown]
# A new key always gets a row, so that it can be trained: key 49 has one, although its score is
# the lowest. The next new key takes that row. `explain` says what became of a key.

# %%
table.explain([49])
table.lookup([50], scores=[50])
for each in table.explain([49, 50]):
    print(each)

# %% [markdown]
# **Expiry.** A row with a time to live expires, however much room there is. `ttl` is a
# `datetime.timedelta`, or a number of steps, as here: lookups that can create rows. Rows live
# from their last use with `ttl_since="access"`, otherwise from their last update.

# %%
table = de.DynamicVariable(4, ttl=5, ttl_since="access")
history = {}
for step in range(12):
    table.lookup([step] if step % 3 else [step, 0])  # key 0 is used every three steps
    history[f"step {step}"] = table.contains(range(12)).numpy()
show(history, "Rows that expire 5 steps after their last use")

# %% [markdown]
# **The time of the data.** Who trains on last month's log lets the log say what time it is.

# %%
day = datetime.timedelta(days=1)
table = de.DynamicVariable(4, ttl=30 * day, ttl_clock="data")
table.set_data_time(datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc))
table.lookup([1, 2])
table.set_data_time(datetime.datetime(2026, 1, 20, tzinfo=datetime.timezone.utc))
table.upsert([2], np.zeros((1, 4)))
table.set_data_time(datetime.datetime(2026, 2, 5, tzinfo=datetime.timezone.utc))
print("on 5 February:", table.contains([1, 2]).numpy(), "for keys 1 and 2")

# %% [markdown]
# **Admission.** Most ids of a log come once or twice, and are not worth a row. With
# `de.Frequency(3)` a key gets a row when it was asked for three times. Until then it reads as
# zeros. In the plot, key k comes in every k-th batch.

# %%
table = de.DynamicVariable(4, admission=de.Frequency(3))
history = {}
for step in range(12):
    table.lookup([key for key in range(1, 12) if step % key == 0])
    history[f"batch {step}"] = table.contains(range(12)).numpy()
show(history, "Keys that have come three times")
print("times that key 6 has come:", table.explain([6])[0].admission_count)

# %% [markdown]
# **Together.** With admission, the keys that come once evict nothing, and `"lru"` has room for
# all others.

# %%
options = {"no admission": {}, "Frequency(2)": {"admission": de.Frequency(2)}}
kept = {}
for name, more in options.items():
    table = de.DynamicVariable(4, max_capacity=20, **more)
    for batch in batches:
        table.lookup(batch)
    kept[name] = table.contains(range(140)).numpy()
show(kept, "lru, 20 rows after 40 batches")

# %% [markdown]
# **On request.** `size_if`, `erase_if` and `export_if` count, remove and return the rows that
# satisfy conditions. `evict` reduces a table to a number of rows.

# %%
print(table.size_if(key_below=10), "rows of keys below 10")
table.erase_if(key_below=10)
table.evict(to_rows=3)
show({"table": table.contains(range(140)).numpy()}, "3 rows")

# %% [markdown]
# `de.layers.Embedding` takes the same options. `docs/choosing_what_stays.md` measures which of
# them suits which data. Next: [serving](serving.ipynb).

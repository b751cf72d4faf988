"""The ages of rows in dumps, deltas and checkpoints."""

import dataclasses
import datetime
import pathlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from chain_reader import fold, read_snapshot
from expiry_helpers import DAY, held, make, step

import tf_dynemb as de
from tf_dynemb import cli, serving, storage
from tf_dynemb.format.table_entry import TableEntry


def test_deltas_carry_expired_keys(tmp_path):
    table = make(3)
    step(table, [1, 2, 3])
    de.dump(tmp_path, [table], quiet=True)
    reader = serving.Reader(tmp_path)
    follower = make(None)
    de.load(tmp_path, {"items": follower}, quiet=True)
    step(table, [4])
    table.upsert([2], [[1.0, 1.0]])
    step(table)  # 1 and 3 expire
    de.incremental_dump(tmp_path, [table], quiet=True)
    rows, deleted = read_snapshot(storage.Chain.open(tmp_path).last, "items")
    assert (rows.keys.tolist(), deleted.tolist()) == ([2, 4], [1, 3])
    reader.follow()
    assert sorted(key for keys, _ in reader.items("items") for key in keys) == [2, 4]
    de.apply_delta(tmp_path, {"items": follower})
    assert held(follower, [1, 2, 3, 4]) == [2, 4]
    for _ in range(3):
        step(table)
    de.dump(tmp_path / "later", [table], quiet=True)
    assert fold(storage.Chain.open(tmp_path / "later"))["items"].keys.tolist() == []


@pytest.mark.parametrize("how", ["load", "checkpoint"])
def test_rows_that_have_expired_in_a_file_are_named_by_the_load(tmp_path, how, recwarn):
    def table(ttl):
        return de.DynamicVariable(2, name="items", ttl=ttl)

    written, other, same = (
        table(seconds := datetime.timedelta(seconds=2)),
        table(seconds),
        table(DAY),
    )
    written.lookup([1, 2, 3])

    def load(into):
        if how == "load":
            de.load(tmp_path / "chain", into, quiet=True)
        else:
            tf.train.Checkpoint(t=into).read(str(tmp_path / "c")).assert_consumed()

    de.dump(tmp_path / "chain", written, quiet=True)
    tf.train.Checkpoint(t=written).write(str(tmp_path / "c"))
    load(same)
    assert (len(same), len(recwarn)) == (3, 0)
    time.sleep(2.1)
    with pytest.warns(UserWarning, match="3 of 3 rows of .* are not loaded: their ttl has run out"):
        load(other)
    assert len(other) == 0


@pytest.mark.parametrize("since", ["update", "access"])
@pytest.mark.parametrize("how", ["load", "merge", "checkpoint", "keras"])
def test_ages_continue_after_a_load(tmp_path, how, since):
    table = make(4, ttl_since=since)
    other = make(4, ttl_since=since)
    for key in range(3):
        step(table, [key])
    if how in ("load", "merge"):
        de.dump(tmp_path / "chain", [table], quiet=True)
        step(table, [0, 3])
        de.incremental_dump(tmp_path / "chain", [table], quiet=True)
        path = tmp_path / "chain"
        if how == "merge":
            assert cli.main(["merge", str(path), str(tmp_path / "merged")]) == 0
            path = tmp_path / "merged"
        de.load(path, [other], quiet=True)
    elif how == "checkpoint":
        step(table, [0, 3])
        tf.train.Checkpoint(table=table).write(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(table=other).read(str(tmp_path / "checkpoint")).assert_consumed()
    else:
        step(table, [0, 3])
        file = str(tmp_path / "model.weights.h5")
        layers = [de.layers.Embedding(2, ttl=4, ttl_since=since, name="items") for _ in range(2)]
        models = [keras.Sequential([keras.Input([1], dtype="int64"), layer]) for layer in layers]
        for key in ([0], [1], [2], [0, 3]):
            step(layers[0].table, key)
        models[0].save_weights(file)
        models[1].load_weights(file)
        table, other = (layer.table for layer in layers)
    seen, loaded = [], []
    for _ in range(5):
        seen.append(held(table, range(4)))
        loaded.append(held(other, range(4)))
        step(table)
        step(other)
    by_update = [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3], []]
    by_access = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3], [0, 3], []]
    assert seen == (by_update if since == "update" else by_access)
    # A delta does not say that key 0 was read.
    assert loaded == (by_update if how in ("load", "merge") else seen)


def test_rows_that_were_only_read_are_loaded(tmp_path):
    table = make(2, ttl_since="access")
    step(table, [1])
    de.dump(tmp_path, [table], quiet=True)
    for _ in range(3):
        step(table, [1])  # no change that a delta contains
    de.incremental_dump(tmp_path, [table], quiet=True)
    other = make(2, ttl_since="access")
    de.load(tmp_path, [other], quiet=True)
    assert held(other, [1]) == [1]
    cli.main(["merge", str(tmp_path), "--in-place"])
    de.load(tmp_path, [other], quiet=True)
    assert held(other, [1]) == [1]


def test_rows_without_ages_are_as_old_as_their_load(tmp_path):
    plain = make(None)
    step(plain, [1, 2])
    de.dump(tmp_path, [plain], quiet=True)
    table = make(2)
    for _ in range(5):
        step(table)
    de.load(tmp_path, [table], quiet=True)
    step(table)
    assert held(table, [1, 2]) == [1, 2]
    step(table)
    assert held(table, [1, 2]) == []


def test_another_clock_at_load_is_said(tmp_path):
    table = make(2)
    step(table, [1])
    de.dump(tmp_path, [table], quiet=True)
    other = make(DAY)
    with pytest.warns(UserWarning, match="ttl_clock='steps', not 'wall'"):
        de.load(tmp_path, [other], quiet=True)
    assert held(other, [1]) == [1]


def entry(*marks):
    shards = tuple(
        storage.Shard(rank, 0, 0, 0, expiry_marks=each) for rank, each in enumerate(marks)
    )
    initializer = storage.InitializerEntry(("constant",), (0.0, 0.0))
    return TableEntry("t", 2, "int64", "float32", 0, initializer, None, shards)


def horizon(marks, now, ttl):
    """The tick up to which rows have expired, by the definition of marks."""
    return max(
        [marks[0], *(u for u, t in zip(marks[1::2], marks[2::2], strict=True) if now - t >= ttl)]
    )


def test_marks_of_several_ranks_hold_for_all():
    rng = np.random.default_rng(5)
    for _ in range(200):
        ranks = []
        for _ in range(rng.integers(1, 4)):
            untils = np.cumsum(rng.integers(1, 5, rng.integers(0, 5))).tolist()
            times = np.cumsum(rng.integers(1, 4, len(untils))).tolist()
            pairs = [x for pair in zip(untils, times, strict=True) for x in pair]
            ranks.append((0, *pairs))
        joint = entry(*ranks).expiry_marks
        for now in range(25):
            assert horizon(joint, now, 3) == min(horizon(each, now, 3) for each in ranks)
    assert entry((), ()).expiry_marks == ()
    assert entry((3, 5, 1), ()).expiry_marks == (3, 5, 1)


@pytest.mark.parametrize("marks", [[1, 2], [-1], [5, 4, 1], [0, 5, 2, 6, 1], ["a"], "abc"])
def test_damaged_marks_are_refused(tmp_path, marks):
    table = make(2)
    step(table, [1])
    de.dump(tmp_path, [table], quiet=True)
    snapshot = storage.Chain.open(tmp_path).last
    file = pathlib.Path(snapshot.directory) / "MANIFEST.json"
    manifest = snapshot.manifest
    shard = manifest.tables[0].shards[0]
    damaged = dataclasses.replace(
        manifest,
        tables=(
            dataclasses.replace(
                manifest.tables[0],
                shards=(dataclasses.replace(shard, expiry_marks=marks),),
            ),
        ),
    )
    file.write_text(damaged.to_json())
    with pytest.raises(storage.DataLossError, match="expiry_marks"):
        de.load(tmp_path, [table], quiet=True)
    assert held(table, [1]) == [1]

"""Which tables may replace a chain of snapshots, and which bases a reader takes."""

from __future__ import annotations

import json
import os
import pathlib

import keras
import pytest
import tensorflow as tf
from chain_writer import Form, publish
from dump_helpers import make, vectors_of
from op_helpers import ops
from served_helpers import describe, lookup, opened
from serving_helpers import plain

import tf_dynemb as de
from tf_dynemb import storage
from tf_dynemb.format.manifest import checksum_of
from tf_dynemb.serving import Reader


def directories(path: pathlib.Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name != "LOCK")


def trained(name: str = "t", value: float = 1.0) -> de.DynamicVariable:
    table = make(name)
    table.upsert([1, 2], tf.fill([2, 2], value))
    return table


def test_another_table_of_the_same_name_is_refused(tmp_path):
    table = trained()
    de.dump(tmp_path, table)
    de.incremental_dump(tmp_path, table)
    before = directories(tmp_path)
    with pytest.raises(ValueError, match=r"another table 't'.*overwrite=True") as error:
        de.dump(tmp_path, trained(value=9.0))
    assert str(tmp_path) in str(error.value)
    assert directories(tmp_path) == before
    de.load(tmp_path, other := make("t"))
    assert vectors_of(other) == vectors_of(table)


def by_load(table, path):
    other = make("t")
    de.load(path, other)
    return other


def by_checkpoint(table, path):
    saved = tf.train.Checkpoint(table=table).write(str(path / "checkpoint"))
    other = make("t")
    tf.train.Checkpoint(table=other).read(saved).assert_consumed()
    return other


def by_weights(table, path):
    models = [keras.Sequential([keras.Input((1,)), de.layers.Embedding(2)]) for _ in range(2)]
    models[0].layers[0].table.history = table.history
    models[0].save_weights(path / "w.weights.h5")
    models[1].load_weights(path / "w.weights.h5")
    return models[1].layers[0].table


def by_itself(table, path):
    return table


@pytest.mark.parametrize("restart", [by_load, by_checkpoint, by_weights, by_itself])
def test_a_later_state_of_the_table_replaces_it(tmp_path, restart):
    table = trained()
    de.dump(tmp_path / "chain", table)
    later = restart(table, tmp_path / "chain")
    later.upsert([3], tf.ones([1, 2]))
    de.dump(tmp_path / "chain", {"t": later})
    de.load(tmp_path / "chain", {"t": (other := make())})
    assert vectors_of(other) == vectors_of(later)


def test_a_table_that_is_restored_from_its_flush_replaces_it(tmp_path):
    def table(folder: str) -> de.DynamicVariable:
        return de.DynamicVariable(
            2, name="t", var_type="file", file_path=tmp_path / folder, persistent=True
        )

    first = table("rows")
    first.upsert([1], [[1.0, 2.0]])
    de.dump(tmp_path / "chain", first)
    first.flush()
    history = first.history
    del first
    second = table("rows")
    assert second.history == history
    de.dump(tmp_path / "chain", second)
    assert table("others").history != history
    with pytest.raises(ValueError, match="another table"):
        de.dump(tmp_path / "chain", table("others"))


def test_other_rows_make_another_table(tmp_path):
    table, other = trained(), trained("u")
    de.dump(tmp_path / "t", table)
    de.dump(tmp_path / "u", {"t": other})
    de.load(tmp_path / "u", table)
    with pytest.raises(ValueError, match="another table 't'"):
        de.dump(tmp_path / "t", table)
    de.dump(tmp_path / "u", table)


def test_tables_come_and_none_goes(tmp_path):
    a, b = trained("a"), trained("b")
    de.dump(tmp_path, a)
    de.dump(tmp_path, [a, b])
    with pytest.raises(ValueError, match="snapshots of the tables b, too"):
        de.dump(tmp_path, a)
    de.dump(tmp_path, a, overwrite=True)
    assert [entry.name for entry in storage.Chain.open(tmp_path).last.manifest.tables] == ["a"]


def test_dense_variables_alone(tmp_path):
    first, second = (de.Variable(tf.zeros([2, 2]), name="s") for _ in range(2))
    de.dump(tmp_path, first)
    de.dump(tmp_path, first)
    with pytest.raises(ValueError, match="another table 's'"):
        de.dump(tmp_path, second)
    de.load(tmp_path, second)
    de.dump(tmp_path, second)
    # Beside a table they follow it: a TensorFlow checkpoint does not have their history.
    table = trained()
    de.dump(tmp_path / "both", [table, second])
    de.dump(tmp_path / "both", {"t": table, "s": de.Variable(tf.zeros([2, 2]))})


def test_a_chain_that_cannot_be_read(tmp_path):
    table = trained()
    de.dump(tmp_path, table)
    (only,) = (name for name in directories(tmp_path))
    (tmp_path / only / "MANIFEST.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read.*overwrite=True"):
        de.dump(tmp_path, table)
    de.dump(tmp_path, table, overwrite=True)
    de.load(tmp_path, make("t"))


def test_snapshots_of_an_earlier_version_have_no_history(tmp_path):
    table = trained()
    de.dump(tmp_path / "new", table)
    (old,) = storage.Chain.open(tmp_path / "new").snapshots
    text = old.manifest.to_json().replace(f'"history": "{table.history}"', '"history": null')
    members = json.loads(text)
    del members["crc32c"]
    members["crc32c"] = f"{checksum_of(members):08x}"
    (old.directory / "MANIFEST.json").write_text(json.dumps(members))
    # For this process it is known.
    de.load(tmp_path / "new", other := make("t"))
    de.dump(tmp_path / "new", other)
    assert storage.Chain.open(tmp_path / "new").last.manifest.tables[0].history == other.history


def test_bases_are_kept(tmp_path):
    table = trained()
    for number in range(4):
        de.dump(tmp_path, table, keep=2)
        table.upsert([9], tf.fill([1, 2], float(number)))
        de.incremental_dump(tmp_path, table)
        expected = range(max(0, number - 2) * 2 + 1, number * 2 + 3)
        assert [int(name[:8]) for name in directories(tmp_path)] == list(expected)
    de.dump(tmp_path, table)
    assert [name[:13] for name in directories(tmp_path)] == ["00000009-base"]


def test_what_is_overwritten_stays_until_the_next_base(tmp_path):
    de.dump(tmp_path, trained())
    other = trained(value=9.0)
    de.dump(tmp_path, other, overwrite=True)
    assert [int(name[:8]) for name in directories(tmp_path)] == [1, 2]
    other.erase([1])
    de.incremental_dump(tmp_path, other)
    assert [int(name[:8]) for name in directories(tmp_path)] == [1, 2, 3]
    de.dump(tmp_path, other, overwrite=True)
    assert [int(name[:8]) for name in directories(tmp_path)] == [4]


@pytest.mark.parametrize("keep", [-1, True, 1.0, "1"])
def test_keep_is_a_number(tmp_path, keep):
    with pytest.raises(ValueError, match="keep must be None or a number"):
        de.dump(tmp_path, trained(), keep=keep)
    assert not directories(tmp_path)


# Readers


def test_a_reader_does_not_take_a_base_of_another_table(tmp_path):
    table = trained()
    de.dump(tmp_path, table)
    reader = Reader(tmp_path)
    de.dump(tmp_path, trained(value=9.0), overwrite=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"another table 't'.*unrelated=True"):
            reader.follow()
        assert reader.lookup([1]).tolist() == [[1.0, 1.0]]
    assert Reader(tmp_path).lookup([1]).tolist() == [[9.0, 9.0]]
    assert reader.follow(unrelated=True) == 1
    assert reader.lookup([1]).tolist() == [[9.0, 9.0]]


def test_a_reader_takes_the_base_of_a_trainer_that_was_restarted(tmp_path):
    table = trained()
    de.dump(tmp_path / "chain", table)
    reader = Reader(tmp_path / "chain")
    later = by_checkpoint(table, tmp_path)
    later.upsert([1], [[5.0, 5.0]])
    de.dump(tmp_path / "chain", later)
    assert storage.Chain.open(tmp_path / "chain").last.manifest.after == ()
    assert reader.follow() == 1
    assert reader.lookup([1]).tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize("unrelated", [False, True])
def test_a_served_model_and_a_base_of_another_table(tmp_path, unrelated):
    class Model(tf.Module):
        def __init__(self, table: de.DynamicVariable) -> None:
            super().__init__()
            self.table = table

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def __call__(self, ids):
            return self.table.lookup(ids, insert=False)

    table, chain = trained(), tmp_path / "chain"
    de.dump(chain, table)
    options = {"unrelated": True} if unrelated else {}
    de.export_saved_model(Model(table), tmp_path / "model", dump=chain, **options)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    apply = loaded.signatures["apply_delta"]
    de.dump(chain, trained(value=9.0), overwrite=True)
    if not unrelated:
        with pytest.raises(tf.errors.FailedPreconditionError, match="another table 't'"):
            apply(path=tf.constant(str(chain)))
    else:
        assert int(apply(path=tf.constant(str(chain)))["applied"]) == 1
    assert loaded(tf.constant([1], tf.int64)).numpy().tolist() == [[9.0 if unrelated else 1.0] * 2]


def base(path, history, number, **options):
    forms = {"plain": Form(3, history=history)}
    options |= {"watermark": 1, "watermark_utc_ns": 1}
    return publish(path, "base", plain([1], number), forms=forms, **options).manifest.id


def test_the_error_of_a_model_that_polls(tmp_path):
    chain = tmp_path / "chain"
    base(chain, "1" * 32, 1)
    model = describe(tmp_path, chain, follow=str(chain), follow_seconds=0.01)
    handle = opened(de.DynamicVariable(3, -1.0, "host", name="plain"), model)
    before = lookup(handle, [1]).numpy().tolist()
    base(chain, "2" * 32, 7)
    error = b""
    while not error:
        error = ops.dynemb_served_state(handle).follow_error.numpy()
    assert b"another table 'plain'" in error
    assert lookup(handle, [1]).numpy().tolist() == before


def test_unknown_histories_are_taken(tmp_path):
    base(tmp_path, None, 1)
    reader = Reader(tmp_path)
    for number, history in ((2, "2" * 32), (3, None), (4, "4" * 32)):
        base(tmp_path, history, number)
        assert reader.follow() == 1
        assert reader.lookup([1])[0, 0] == number


@pytest.mark.parametrize("what", ["after", "continues"])
def test_a_base_that_names_what_is_read_is_taken(tmp_path, what):
    first = base(tmp_path, "1" * 32, 1)
    reader = Reader(tmp_path)
    base(tmp_path, "2" * 32, 2, **{what: [first]})
    assert reader.follow() == 1
    assert reader.lookup([1])[0, 0] == 2

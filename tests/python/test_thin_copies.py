"""`publish` with `rows`, `where` and `max_rows`: copies with fewer and smaller rows."""

from __future__ import annotations

import datetime
import json
import math
import shutil
from unittest import mock

import chain_writer
import numpy as np
import pytest
from chain_writer import Change, Form, Row
from cli_helpers import fails, run
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_dynemb as de
from tf_dynemb import cli
from tf_dynemb.chains.merge import merge
from tf_dynemb.format import key_index
from tf_dynemb.format.vector_format import decode, encode
from tf_dynemb.storage import Chain
from tf_dynemb.storage.local_place import list_snapshots

UTC = datetime.timezone.utc
FIRST = 1_700_000_000  # seconds of tick 0; a tick takes a second


class Trainer:
    """Publishes snapshots of a table `t`, and keeps what they have."""

    def __init__(self, path, form, ranks=1, base_tick=0):
        self.path, self.form, self.ranks, self.base_tick = path, form, ranks, base_tick
        self.last, self.snapshots = None, []

    def publish(self, kind, rows, deleted=(), watermark=None):
        """`rows`: (vector, update, access or score) by key."""
        if self.last is None:
            kind = "base"
        tick = watermark or (0 if self.last is None else self.last.watermark) + 10
        times = {"watermark": tick, "watermark_utc_ns": (FIRST + tick) * 10**9}
        if kind == "delta":
            times |= {"parent": self.last.id, "since": self.last.watermark}
        elif self.last is not None:
            times |= {"after": [*self.last.after, *self.last.ids]}
        gone = [key for key in deleted if key not in rows] if kind == "delta" else []
        scored = self.form.evict_strategy is not None
        change = Change(
            {
                key: Row(vector, (0.5,), update, access + self.base_tick * scored)
                for key, (vector, update, access) in rows.items()
            },
            gone,
        )
        self.last = chain_writer.publish(
            self.path, kind, {"t": change}, forms={"t": self.form}, ranks=self.ranks,
            base_tick=self.base_tick, **times,
        ).manifest  # fmt: skip
        self.snapshots.append((kind, rows, gone, self.last.id))
        return self.last


def passes(key, row, where):
    vector, _, access = row
    norm = float(np.sqrt(np.square(vector.astype(np.float64)).sum()))
    fraction = int(key_index.mix(np.array([key]), 0x9D39247E33776D41)[0]) / 2**64
    return (
        where.get("key_from", -math.inf) <= key < where.get("key_below", math.inf)
        and where.get("score_from", -math.inf) <= access < where.get("score_below", math.inf)
        and where.get("l2_from", -math.inf) <= norm < where.get("l2_below", math.inf)
        and fraction < where.get("sample", 2.0)
    )


def best(rows, most):
    def order(key):
        return rows[key][2], int(key_index.mix(np.array([key]))[0])

    return {key: rows[key] for key in sorted(rows, key=order)[max(0, len(rows) - most) :]}


def reference(snapshots, where, most):
    """What a copy of these snapshots has."""
    copy = {}
    for kind, rows, gone, _ in snapshots:
        good = {key: row for key, row in rows.items() if passes(key, row, where)}
        if kind == "base":
            copy = best(good, most) if most else good
            continue
        for key in {*gone, *rows} - good.keys():
            copy.pop(key, None)
        copy |= good
        if most and len(copy) > most:
            copy = best(copy, most - most // 64)
    return copy


def check(copy, expected, dimension, stored):
    reader = de.serving.Reader(copy)
    items = list(reader.items("t"))
    keys = [key for each, _ in items for key in each.tolist()]
    assert sorted(keys) == sorted(expected)
    if not keys:
        return
    vectors = np.stack([expected[key][0] for key in keys])
    want = decode(encode(vectors, stored), dimension)
    np.testing.assert_array_equal(np.concatenate([each for _, each in items]), want)


CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "key_from": st.integers(-5, 40),
        "key_below": st.integers(0, 60),
        "score_from": st.integers(0, 20),
        "score_below": st.integers(0, 40),
        "l2_from": st.floats(0, 3),
        "l2_below": st.floats(1, 6),
        "sample": st.floats(0, 1),
    },
)


@settings(max_examples=60)
@given(
    where=CONDITIONS,
    most=st.sampled_from([0, 1, 5, 12, 130]),
    stored=st.sampled_from(["float32", "float16", "int8", "int4"]),
    ranks=st.integers(1, 2),
    steps=st.lists(
        st.tuples(st.sampled_from(["base", "delta", "delta", "delta", "publish", "publish"]),
                  st.integers(0, 30)),
        max_size=9,
    ),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_copy_has_the_rows_that_it_is_asked_for(
    tmp_path_factory, where, most, stored, ranks, steps, seed
):
    folder = tmp_path_factory.mktemp("thin")
    rng = np.random.default_rng(seed)
    trainer = Trainer(folder / "chain", Form(3, evict_strategy="score", history="ab" * 16), ranks)
    keys = np.arange(50 if most < 100 else 200)

    def rows(count):
        count = count if most < 100 else 5 * count
        return {
            int(key): (rng.normal(size=3).astype(np.float32), 0, int(rng.integers(0, 25)))
            for key in rng.choice(keys, min(count, len(keys)), replace=False)
        }

    options = {"rows": stored, "where": where, "max_rows": most}
    trainer.publish("base", rows(30))
    for kind, count in [*steps, ("publish", 0)]:
        if kind != "publish":
            trainer.publish(kind, rows(count), rng.choice(keys, 4, replace=False).tolist())
            continue
        de.publish(folder / "copy", from_=folder / "chain", **options)
        options = {}  # the copy remembers them
        last_base = max(i for i, each in enumerate(trainer.snapshots) if each[0] == "base")
        expected = reference(trainer.snapshots[last_base:], where, most)
        check(folder / "copy", expected, 3, stored)
        if most:
            assert len(expected) <= most
    assert cli.main(["verify", str(folder / "copy")]) == 0
    ids = [name.id for name in list_snapshots(folder / "copy")]
    assert ids == [each[3] for each in trainer.snapshots[last_base:]][-len(ids) :]
    shutil.rmtree(folder)


def test_a_table_at_its_limit(tmp_path):
    """Deltas take rows away down to 63/64 of the limit, and then some can grow again."""
    form = Form(1, evict_strategy="lfu", history="ab" * 16)
    trainer, copy = Trainer(tmp_path / "chain", form, ranks=2), tmp_path / "copy"
    sizes = []
    for step in range(12):
        keys = range(100 * step, 100 * step + (200 if step == 0 else 3))
        trainer.publish("delta", {key: (vector(key, 1), 0, key % 7) for key in keys})
        de.publish(copy, from_=trainer.path, max_rows=130)
        expected = reference(trainer.snapshots, {}, 130)
        check(copy, expected, 1, "float32")
        sizes.append(len(expected))
    assert sizes == [130, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128]


def test_the_rows_that_were_used_last(tmp_path):
    """Snapshots count ticks from different ones."""
    trainer, copy = Trainer(tmp_path / "chain", Form(1, history="ab" * 16)), tmp_path / "copy"
    trainer.publish("base", {key: (vector(key, 1), key, key) for key in range(50, 60)}, (), 90)
    de.publish(copy, from_=trainer.path, max_rows=4)
    assert keys_of(copy) == [56, 57, 58, 59]
    trainer.base_tick = 95
    trainer.publish("delta", {key: (vector(key, 1), key, key) for key in (97, 98)})
    de.publish(copy, from_=trainer.path)
    assert keys_of(copy) == [58, 59, 97, 98]


def remembered(path):
    """The arguments that a copy has."""
    options = Chain.open(path).last.manifest.copy
    return {name: value for name, value in options.items() if name != "clock"}


def vector(number, dimension=2):
    return np.full(dimension, number, np.float32)


def keys_of(path, table="t"):
    return sorted(key for keys, _ in de.serving.Reader(path).items(table) for key in keys.tolist())


def test_times(tmp_path):
    """Of datetimes, and before the watermark; both of updates and of accesses."""
    form = Form(2, history="ab" * 16)
    trainer, copy = Trainer(tmp_path / "chain", form, base_tick=3), tmp_path / "copy"
    trainer.publish("base", {key: (vector(key), key, key + 1) for key in range(3, 10)})
    trainer.publish("delta", {key: (vector(key), key, key) for key in (12, 17)})
    trainer.publish("delta", {key: (vector(key), key, key) for key in (25,)})

    def kept(**where):
        shutil.rmtree(copy, ignore_errors=True)
        de.publish(copy, from_=tmp_path / "chain", where=where)
        return keys_of(copy)

    def at(tick):
        return datetime.datetime.fromtimestamp(FIRST + tick, UTC)

    everything = [*range(3, 10), 12, 17, 25]
    assert kept(updated_since=at(5)) == everything  # before the first time that is known
    assert kept(updated_since=at(10)) == [12, 17, 25]
    assert kept(updated_since=at(29)) == [25]
    assert kept(updated_before=at(20)) == [*range(3, 10), 12, 17]
    assert kept(accessed_since=at(10)) == [12, 17, 25]
    assert kept(accessed_since=at(10).isoformat()) == [12, 17, 25]
    # A duration is before the watermark of each snapshot: the base's of 10 ticks knows no time
    # before it, the second one's is at tick 10, the third one's at 20.
    assert kept(updated_since="10s") == everything
    assert kept(updated_since=datetime.timedelta(seconds=10)) == everything
    assert kept(accessed_since="0s") == []
    # A copy knows the times of all snapshots that it has had, and rows of a base have other times.
    shutil.rmtree(copy)
    de.publish(copy, from_=tmp_path / "chain", where={"accessed_since": "15s"})
    rows = {key: (vector(key), key, key) for key in (8, 14, 22, 33)}
    trainer.publish("base", rows)
    de.publish(copy, from_=tmp_path / "chain")
    assert keys_of(copy) == [22, 33]
    recorded = Chain.open(copy).last.manifest.copy
    assert recorded["where"] == {"accessed_since": "15s"}
    assert [tick for tick, _ in recorded["clock"]] == [10, 20, 30, 40]


def test_options_of_tables(capsys, tmp_path):
    forms = {"a": Form(2, history="ab" * 16), "b": Form(4, "int32", evict_strategy="lfu")}
    rows = {"a": 2, "b": 4}
    changes = {
        name: Change({k: Row(vector(k, d), (), k, k) for k in range(10)})
        for name, d in rows.items()
    }
    chain_writer.publish(tmp_path / "chain", "base", changes, forms=forms, watermark=10)
    run(
        capsys, "publish", tmp_path / "chain", tmp_path / "copy", "--rows", "b=int8",
        "--where", "b:score_from=4", "--where", "a:l2_below=4.5", "--where", "b:key_below=9",
        "--max-rows", "a=2",
    )  # fmt: skip
    assert keys_of(tmp_path / "copy", "a") == [2, 3]
    assert keys_of(tmp_path / "copy", "b") == [4, 5, 6, 7, 8]
    manifest = Chain.open(tmp_path / "copy").last.manifest
    assert [table.vector_format for table in manifest.tables] == [None, "int8"]
    assert remembered(tmp_path / "copy") == {
        "rows": {"b": "int8"},
        "where": {"b": {"score_from": 4, "key_below": 9}, "a": {"l2_below": 4.5}},
        "max_rows": {"a": 2},
    }
    out = run(capsys, "inspect", tmp_path / "copy", "--json")[1]
    (snapshot,) = json.loads(out)["snapshots"]
    assert [table["vector_format"] for table in snapshot["tables"]] == ["float32", "int8"]
    # The reader of a table of int32 keys and int8 rows, and a later version of the manifest.
    text = (Chain.open(tmp_path / "copy").last.directory / "MANIFEST.json").read_text()
    assert json.loads(text)["version"] == 4


def test_arguments_that_end(tmp_path):
    """What is remembered can be changed, and taken back."""
    trainer, copy = Trainer(tmp_path / "chain", Form(2, history="ab" * 16)), tmp_path / "copy"
    rows = {key: (vector(key), 0, key) for key in range(10)}
    trainer.publish("base", rows)
    de.publish(copy, from_=trainer.path, rows="int8", where={"key_below": 5}, max_rows=3)
    trainer.publish("delta", {4: (vector(4), 0, 4), 7: (vector(7), 0, 7)})
    de.publish(copy, from_=trainer.path, rows="float32", where={})
    assert keys_of(copy) == [3, 4, 7]
    trainer.publish("delta", {9: (vector(9), 0, 0)})
    de.publish(copy, from_=trainer.path, max_rows=0)
    assert keys_of(copy) == [3, 4, 7, 9]
    formats = [each.manifest.tables[0].stored_as for each in Chain.open(copy).snapshots]
    assert formats == ["int8", "float32", "float32"]
    trainer.publish("base", rows)
    de.publish(copy, from_=trainer.path)
    assert keys_of(copy) == list(range(10))
    assert remembered(copy) == {"rows": "float32", "max_rows": 0}


def test_arguments_without_new_snapshots(tmp_path):
    trainer, copy = Trainer(tmp_path / "chain", Form(2, history="ab" * 16)), tmp_path / "copy"
    trainer.publish("base", {key: (vector(key), 0, key) for key in range(9)})
    de.publish(copy, from_=trainer.path)
    reader = de.serving.Reader(copy)
    new = Chain.open(copy).last.directory / "MANIFEST.json.new"
    new.write_text("what a call that was killed has left")
    with mock.patch("os.replace", side_effect=OSError(28, "planted")), pytest.raises(OSError):  # noqa: PT011
        de.publish(copy, from_=trainer.path, max_rows=4)
    assert not new.exists()
    assert remembered(copy) == {}
    assert de.publish(copy, from_=trainer.path, max_rows=np.int64(4), rows="int8") == []
    assert not new.exists()
    assert remembered(copy) == {"rows": "int8", "max_rows": 4}
    assert cli.main(["verify", str(copy)]) == 0
    trainer.publish("delta", {9: (vector(9), 0, 9)})
    de.publish(copy, from_=trainer.path)
    reader.follow()
    assert keys_of(copy) == sorted(k for ks, _ in reader.items("t") for k in ks.tolist())
    assert keys_of(copy) == [6, 7, 8, 9]


def test_times_from_before_there_were_conditions(tmp_path):
    trainer, copy = Trainer(tmp_path / "chain", Form(2, history="ab" * 16)), tmp_path / "copy"
    trainer.publish("base", {1: (vector(1), 1, 1)})
    for key in (15, 25, 35, 45):
        trainer.publish("delta", {key: (vector(key), key, key)})
        de.publish(copy, from_=trainer.path)
    trainer.last = merge(trainer.path).manifest
    de.publish(copy, from_=trainer.path, where={"updated_since": "15s"})
    assert keys_of(copy) == [35, 45]


def test_a_copy_that_was_merged(tmp_path):
    """It has its arguments, and goes on."""
    trainer, copy = Trainer(tmp_path / "chain", Form(2, history="ab" * 16)), tmp_path / "copy"
    trainer.publish("base", {key: (vector(key), 0, key) for key in range(9)})
    trainer.publish("delta", {key: (vector(key), 0, key) for key in range(3, 12)})
    de.publish(copy, from_=trainer.path, rows="int8", where={"key_below": 10})
    reader = de.serving.Reader(copy)
    merge(copy)
    assert remembered(copy) == {"rows": "int8", "where": {"key_below": 10}}
    assert de.publish(copy, from_=trainer.path) == []
    trainer.publish("delta", {key: (vector(-key), 0, key) for key in (2, 11)})
    assert len(de.publish(copy, from_=trainer.path)) == 1
    assert keys_of(copy) == list(range(10))
    reader.follow()
    np.testing.assert_array_equal(reader.lookup([2], "t"), de.serving.Reader(copy).lookup([2], "t"))


def test_paths_that_are_not_copies(tmp_path):
    """Neither a chain of training nor later snapshots are replaced."""
    trainer, copy = Trainer(tmp_path / "chain", Form(2, history="ab" * 16)), tmp_path / "copy"
    trainer.publish("base", {key: (vector(key), 0, key) for key in range(9)})
    de.publish(copy, from_=trainer.path, max_rows=2)
    shutil.copytree(trainer.path, tmp_path / "backup")
    trainer.publish("base", {key: (vector(key), 0, key) for key in range(19)})
    before = sorted(trainer.path.iterdir())
    with pytest.raises(ValueError, match="has snapshots that publish did not write"):
        de.publish(trainer.path, from_=copy)
    assert sorted(trainer.path.iterdir()) == before
    de.publish(copy, from_=trainer.path)
    with pytest.raises(ValueError, match="would replace later snapshots"):
        de.publish(copy, from_=tmp_path / "backup")
    assert keys_of(copy) == [17, 18]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "saved_model.pb").touch()
    with pytest.raises(ValueError, match="is a SavedModel, and cannot contain snapshots"):
        de.publish(tmp_path / "model", from_=trainer.path)


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_lookups_of_deleted_keys_only(tmp_path, stored):
    trainer, copy = Trainer(tmp_path / "chain", Form(3, history="ab" * 16)), tmp_path / "copy"
    trainer.publish("base", {key: (vector(key, 3), 0, key) for key in range(4)})
    trainer.publish("delta", {}, [2])
    de.publish(copy, from_=trainer.path, rows=stored)
    reader = de.serving.Reader(copy)
    assert not reader.lookup([2, 9], "t", default=0.0).any()
    assert reader.contains([1, 2], "t").tolist() == [True, False]


def test_diff_of_formats(capsys, tmp_path):
    trainer = Trainer(tmp_path / "chain", Form(3, history="ab" * 16))
    rng = np.random.default_rng(0)
    rows = {key: (rng.normal(size=3).astype(np.float32), 0, key) for key in range(4)}
    trainer.publish("base", {**rows, 5: (vector(0, 3), 0, 0)})
    for stored in ("int8", "int4"):
        de.publish(tmp_path / stored, from_=trainer.path, rows=stored)
    code, out = run(capsys, "diff", tmp_path / "chain", tmp_path / "int8", "--json")
    assert code == 1
    (table,) = json.loads(out)["tables"]
    assert table["vectors"] == {"count": 4, "first": [0, 1, 2, 3]}
    assert run(capsys, "diff", tmp_path / "int4", tmp_path / "int8")[0] == 1
    assert run(capsys, "diff", tmp_path / "int4", tmp_path / "int4")[0] == 0


def test_copies_of_copies_and_their_merging(tmp_path):
    trainer = Trainer(tmp_path / "chain", Form(5, history="ab" * 16))
    rng = np.random.default_rng(1)
    rows = {key: (rng.normal(size=5).astype(np.float32), 0, key) for key in range(40)}
    trainer.publish("base", rows)
    trainer.publish("delta", {key: rows[key] for key in range(5)}, [7])
    de.publish(tmp_path / "int8", from_=trainer.path, rows="int8")
    de.publish(tmp_path / "as_is", from_=tmp_path / "int8")
    de.publish(tmp_path / "wider", from_=tmp_path / "int8", rows="float16")
    de.publish(tmp_path / "int4", from_=tmp_path / "int8", rows="int4")
    expected = {key: row for key, row in rows.items() if key != 7}
    for name in ("int8", "as_is", "wider"):
        check(tmp_path / name, expected, 5, "int8")
        assert Chain.open(tmp_path / name).last.manifest.tables[0].stored_as == "int8"
    twice = {
        key: (decode(encode(row[0][np.newaxis], "int8"), 5)[0], 0, 0)
        for key, row in expected.items()
    }
    check(tmp_path / "int4", twice, 5, "int4")
    # A merged base has the format of its base, and the bytes of rows that are in that format.
    trainer.publish("delta", {8: rows[8]})
    de.publish(tmp_path / "int8", from_=trainer.path, rows="float32")
    merge(tmp_path / "int8")
    check(tmp_path / "int8", expected, 5, "int8")
    assert len(list_snapshots(tmp_path / "int8")) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"rows": "int2"},
            ValueError,
            "rows must be one of float32, float16, .*, got 'int2'",
        ),
        ({"rows": {"u": "int8"}}, ValueError, "rows has 'u', but the tables are 't'"),
        ({"rows": ["int8"]}, ValueError, r"rows must be one of float32, .*, got \['int8'\]"),
        ({"keep": "1"}, ValueError, "keep must be a number of bases, got '1'"),
        ({"where": {"t": {"sample": 1}, "l2_from": 1}}, TypeError, "or the conditions of tables"),
        ({"where": {"l2_from": math.inf}}, ValueError, "l2_from must be finite, got inf"),
        (
            {"where": {"updated_since": -datetime.timedelta(1)}},
            ValueError,
            "is not a duration before the snapshot",
        ),
        ({"where": {"updated_since": "2026-01-31"}}, ValueError, "is neither a time with its zone"),
        ({"max_rows": -1}, ValueError, "max_rows must be a number of rows, got -1"),
        ({"max_rows": 1.5}, ValueError, "max_rows must be a number of rows, got 1.5"),
        ({"where": ["l2_from"]}, TypeError, "where must be a dict of conditions"),
        ({"where": {"norm": 1}}, TypeError, "Unknown condition norm=1; known: key_from"),
        ({"where": {"score_from": 1}}, ValueError, "score_from needs a table with scores, but 't'"),
        ({"where": {"key_from": 1.5}}, TypeError, "key_from must be an integer"),
        ({"where": {"sample": 1.5}}, ValueError, "sample must be a fraction from 0 to 1, got 1.5"),
        ({"where": {"l2_from": "x"}}, TypeError, "l2_from must be a number"),
        ({"where": {"updated_since": 5}}, TypeError, "updated_since must be a datetime"),
        (
            {"where": {"updated_since": "5 weeks"}},
            ValueError,
            "is neither a time with its zone, such as",
        ),
        ({"where": {"updated_since": datetime.datetime(2026, 1, 1)}}, ValueError, "no time zone"),
        ({"where": {"u": {"l2_from": 1}}}, ValueError, "where has 'u', but the tables are 't'"),
    ],
)
def test_wrong_arguments(tmp_path, options, error, message):
    """Nothing is created, and a copy that is there stays as it is."""
    trainer = Trainer(tmp_path / "chain", Form(2, history="ab" * 16))
    trainer.publish("base", {1: (vector(1), 0, 0)})
    with pytest.raises(error, match=message):
        de.publish(tmp_path / "copy", from_=trainer.path, **options)
    assert not (tmp_path / "copy").exists()
    de.publish(tmp_path / "copy", from_=trainer.path)
    trainer.publish("delta", {2: (vector(2), 0, 0)})
    with pytest.raises(error, match=message):
        de.publish(tmp_path / "copy", from_=trainer.path, **options)
    assert keys_of(tmp_path / "copy") == [1]


def test_wrong_arguments_of_the_command(capsys, tmp_path):
    trainer = Trainer(tmp_path / "chain", Form(2, history="ab" * 16))
    trainer.publish("base", {1: (vector(1), 0, 0)})
    for options, message in (
        (["--where", "l2_from=x"], "'x' is not a number"),
        (["--where", "l2_from"], "--where l2_from: pass CONDITION=VALUE"),
        (["--where", "l2_from=1", "--where", "t:l2_from=1"], "pass conditions for all tables, or"),
        (["--rows", "int8", "--rows", "t=int8"], "pass one value, or one for each table"),
        (["--max-rows", "many"], "'many' is not a number"),
        (["--where", "norm=1"], "error: Unknown condition norm=1"),
        (["--where", "key_from=1.5"], "error: key_from must be an integer"),
        (
            ["--where", "sample=.5", "--where", "sample=.9"],
            "the condition is there twice",
        ),
    ):
        said = fails(capsys, 2, "publish", trainer.path, tmp_path / "copy", *options)
        assert message in said, said
    assert not (tmp_path / "copy").exists()
    run(capsys, "publish", trainer.path, tmp_path / "copy", "--where", "l2_from=100")
    assert keys_of(tmp_path / "copy") == []
    trainer.publish("base", {1: (vector(1), 0, 0)})
    run(capsys, "publish", trainer.path, tmp_path / "copy", "--where", "none")
    assert keys_of(tmp_path / "copy") == [1]

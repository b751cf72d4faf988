"""`publish`: copies of chains that have what lookups need, and go on with the chain."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil

import chain_writer
import keras
import numpy as np
import pytest
import tensorflow as tf
from chain_writer import Change, Form, Row
from cli_helpers import FORMS, fails, run, write_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_helpers import flipped

import tf_dynemb as de
from tf_dynemb import cli
from tf_dynemb.chains.merge import merge, rollback
from tf_dynemb.storage import Chain, DataLossError, Publication
from tf_dynemb.storage.local_place import list_snapshots

KEYS = np.arange(20)
FORM = Form(2, state_width=2, history="ab" * 16)


def answers(reader):
    """Returns what a reader answers: its snapshot, and the rows of KEYS in each table."""
    found = {
        name: (reader.contains(KEYS, name).tolist(), reader.lookup(KEYS, name).tolist())
        for name in reader.tables
    }
    return reader.id, reader.watermark, found


def same(path, copy):
    return answers(de.serving.Reader(path)) == answers(de.serving.Reader(copy))


class Trainer:
    """Publishes snapshots of one table, and notes their ids."""

    def __init__(self, path, form=FORM):
        self.path, self.tick, self.last, self.form = path, 0, None, form

    def publish(self, kind, keys, deleted=()):
        self.tick += 10
        rows = {
            key: Row(np.full(2, self.tick + key, np.float32), (1.0, 2.0), self.tick, self.tick)
            for key in keys
        }
        times = {"watermark": self.tick}
        if kind == "delta":
            times |= {"parent": self.last.id, "since": self.last.watermark}
        elif self.last is not None:
            times |= {"after": [*self.last.after, *self.last.ids]}
        changes = {"t": Change(rows, [key for key in deleted if key not in rows])}
        forms = {"t": self.form}
        snapshot = chain_writer.publish(self.path, kind, changes, forms=forms, **times)
        self.last = snapshot.manifest

    def do(self, action, keys):
        if action == "merge":
            merged = merge(self.path)
            self.last = self.last if merged is None else merged.manifest
        elif action == "rollback":
            names = list_snapshots(self.path)
            if len(names) > 1:
                self.last = rollback(self.path, names[-2].id).manifest
                self.tick = max(self.tick, self.last.watermark)
        else:
            self.publish(action, keys, [key + 1 for key in keys] if action == "delta" else [])


ACTIONS = st.sampled_from(["base", "delta", "delta", "delta", "merge", "rollback", "publish"])


@settings(max_examples=40)
@given(st.lists(st.tuples(ACTIONS, st.sets(st.integers(0, 19), max_size=5)), max_size=12))
def test_a_copy_follows_its_chain(tmp_path_factory, steps):
    """Whatever happens to the chain between two calls; so do readers that follow the copy."""
    folder = tmp_path_factory.mktemp("copy")
    path, copy = folder / "chain", folder / "copy"
    trainer = Trainer(path)
    trainer.do("base", {1, 2, 3})
    de.publish(copy, from_=path)
    reader = de.serving.Reader(copy)
    for action, keys in [*steps, ("publish", ())]:
        if action != "publish":
            trainer.do(action, keys)
            continue
        de.publish(copy, from_=path)
        assert same(path, copy)
        reader.follow()
        assert answers(reader) == answers(de.serving.Reader(path))
        assert de.publish(copy, from_=path) == []
    assert cli.main(["verify", str(copy)]) == 0
    shutil.rmtree(folder)


def test_what_a_copy_has(capsys, tmp_path):
    written = write_chain(tmp_path / "chain", 2)
    code, out = run(capsys, "publish", tmp_path / "chain", tmp_path / "copy")
    copied = Chain.open(tmp_path / "copy").snapshots
    assert code == 0
    lines = [*(str(each.directory) for each in copied), "published: 3"]
    assert out.splitlines() == lines
    for one, other in zip(written, copied, strict=True):
        was, now = one.manifest, other.manifest
        assert (now.id, now.parent, now.watermark) == (was.id, was.parent, was.watermark)
        assert (now.since, now.watermark_utc_ns) == (was.since, was.watermark_utc_ns)
        assert now.optimizer is None
        assert [table.state for table in now.tables] == [None] * len(FORMS)
        assert not any("state" in file.file for file in other.files)
        assert len(list(other.directory.iterdir())) == 1 + len(other.files)
    assert run(capsys, "verify", tmp_path / "copy")[0] == 0
    assert run(capsys, "publish", tmp_path / "chain", tmp_path / "copy") == (0, "published: 0\n")


def test_bases_that_stay(tmp_path):
    trainer, copy = Trainer(tmp_path / "chain"), tmp_path / "copy"
    for _ in range(4):
        trainer.do("base", {1})
        trainer.do("delta", {2})
        de.publish(copy, from_=trainer.path, keep=1)
    assert [name.kind for name in list_snapshots(copy)] == ["base", "delta"] * 2
    trainer.do("base", {1})
    de.publish(copy, from_=trainer.path)
    assert [name.kind for name in list_snapshots(copy)] == ["base"]


@pytest.mark.parametrize(("module", "name"), [(os, "rename"), (os, "fsync"), (os, "mkdir")])
@pytest.mark.parametrize(
    "options", [{}, {"rows": "int8", "where": {"key_below": 5}, "max_rows": 3}]
)
def test_a_call_that_fails(tmp_path, monkeypatch, module, name, options):
    """Wherever it fails, the copy has whole snapshots, and the next call goes on."""
    trainer, copy = Trainer(tmp_path / "chain"), tmp_path / "copy"
    trainer.do("base", {1, 2, 3})
    trainer.do("delta", {2, 4})
    trainer.do("delta", {5})
    de.publish(tmp_path / "in_one_go", from_=trainer.path, **options)
    lengths, real = [], getattr(module, name)
    while lengths[-1:] != [3]:
        left = len(lengths)  # the number of calls before the one that fails

        def limited(*args, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(28, "planted")
            return real(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(module, name, limited)
            with contextlib.suppress(OSError):
                de.publish(copy, from_=trainer.path, **options)
        names = list_snapshots(copy) if copy.exists() else []
        assert not list(copy.glob(".tmp-*"))
        lengths.append(len(names))
        if names:
            assert cli.main(["verify", str(copy)]) == 0
            de.publish(copy, from_=trainer.path)
            assert same(tmp_path / "in_one_go", copy)
        shutil.rmtree(copy, ignore_errors=True)
    assert lengths == sorted(lengths)
    assert set(lengths) >= {0, 1, 2, 3}


def test_what_a_killed_process_has_left(tmp_path):
    trainer, copy = Trainer(tmp_path / "chain"), tmp_path / "copy"
    trainer.do("base", {1})
    de.publish(copy, from_=trainer.path)
    trainer.do("delta", {2})
    left = copy / f".tmp-{trainer.last.id}"
    left.mkdir()
    (left / "000.r0.keys.npy").write_bytes(b"half")
    de.publish(copy, from_=trainer.path)
    assert same(trainer.path, copy)
    assert not left.exists()


def test_damage_stays_where_it_is(tmp_path):
    trainer, copy = Trainer(tmp_path / "chain"), tmp_path / "copy"
    trainer.do("base", {1})
    trainer.do("delta", {2})
    directory = Chain.open(trainer.path).last.directory
    file = directory / "000.r0.vectors.npy"
    sound = file.read_bytes()
    file.write_bytes(flipped(sound, len(sound) - 1))
    with pytest.raises(DataLossError, match=str(file)):
        de.publish(copy, from_=trainer.path)
    assert [name.kind for name in list_snapshots(copy)] == ["base"]
    assert cli.main(["verify", str(copy)]) == 0
    file.write_bytes(sound)
    assert len(de.publish(copy, from_=trainer.path)) == 1
    # What the copy does not have need not be sound.
    state = directory / "000.r0.state.npy"
    state.write_bytes(b"")
    shutil.rmtree(copy)
    assert len(de.publish(copy, from_=trainer.path)) == 2


def test_what_is_refused(capsys, tmp_path):
    trainer, copy = Trainer(tmp_path / "chain"), tmp_path / "copy"
    trainer.do("base", {1})
    with pytest.raises(ValueError, match="is the chain itself"):
        de.publish(trainer.path, from_=trainer.path)
    with pytest.raises(ValueError, match="is a snapshot, and cannot contain snapshots"):
        de.publish(Chain.open(trainer.path).last.directory, from_=trainer.path)
    with pytest.raises(FileNotFoundError, match="holds no snapshot"):
        de.publish(copy, from_=tmp_path / "nothing")
    assert not copy.exists()
    with pytest.raises(ValueError, match="keep must be a number of bases, got -1"):
        de.publish(copy, from_=trainer.path, keep=-1)
    write_chain(tmp_path / "other")
    de.publish(copy, from_=tmp_path / "other")
    before = sorted(copy.iterdir())
    message = fails(capsys, 2, "publish", trainer.path, copy)
    assert "would replace the snapshots of other tables" in message
    assert sorted(copy.iterdir()) == before
    deltas = tmp_path / "deltas"
    shutil.copytree(trainer.path, tmp_path / "longer")
    trainer.path = tmp_path / "longer"
    trainer.do("delta", {2})
    last = Chain.open(trainer.path).last.directory
    shutil.copytree(last, deltas / last.name)
    with pytest.raises(ValueError, match=r"is a delta that continues .*, but .*new is empty"):
        de.publish(tmp_path / "new", from_=deltas)
    with (
        Publication(tmp_path / "busy", "base"),
        pytest.raises(RuntimeError, match="another process writes at"),
    ):
        de.publish(tmp_path / "busy", from_=trainer.path)


def test_a_copy_that_was_long_away(tmp_path):
    """A base has the ids of the last snapshots before it only."""
    trainer, copy = Trainer(tmp_path / "chain"), tmp_path / "copy"
    trainer.do("base", {1})
    de.publish(copy, from_=trainer.path)
    for _ in range(2):
        trainer.publish("base", {2})
        trainer.last = chain_writer.publish(
            trainer.path,
            "base",
            {"t": Change({3: Row(np.ones(2, np.float32), (1.0, 2.0))})},
            forms={"t": FORM},
            watermark=trainer.tick + 5,
        ).manifest
    de.publish(copy, from_=trainer.path)
    assert same(trainer.path, copy)


def test_tables_without_a_history(tmp_path):
    """Those of old dumps: a base then has to name the snapshots before it."""
    form = dataclasses.replace(FORM, history=None)
    trainer, copy = Trainer(tmp_path / "chain", form), tmp_path / "copy"
    trainer.do("base", {1})
    de.publish(copy, from_=trainer.path)
    trainer.do("base", {2})
    de.publish(copy, from_=trainer.path)
    assert same(trainer.path, copy)
    trainer.last = None
    trainer.do("base", {3})
    with pytest.raises(ValueError, match="would replace the snapshots of other tables"):
        de.publish(copy, from_=trainer.path)


def test_a_served_model_follows_the_copy(tmp_path):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(8, name="table")(ids))
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(vectors))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    rng = np.random.default_rng(1)
    inputs, labels = rng.integers(0, 500, (512, 1)), rng.normal(size=[512, 1])
    chain, copy = tmp_path / "chain", tmp_path / "copy"
    model.fit(inputs, labels, verbose=0)
    de.dump(chain, model, model.optimizer)
    de.publish(copy, from_=chain)

    def size(path):
        return sum(file.stat().st_size for file in path.rglob("*.npy"))

    assert size(copy) < 0.6 * size(chain)
    de.export_saved_model(model, tmp_path / "model", "link", copy, follow=copy, follow_seconds=60)
    loaded = tf.saved_model.load(tmp_path / "model")
    for _ in range(2):
        model.fit(inputs, labels, verbose=0)
        last = de.incremental_dump(chain, model, optimizer=model.optimizer)
        (published,) = de.publish(copy, from_=chain)
        assert published.manifest.id == last.id
        loaded.apply_delta(tf.constant(str(copy)))
        found, expected = loaded.serve(tf.constant(inputs)), model.predict(inputs, verbose=0)
        assert np.allclose(found, expected, atol=1e-6)
        assert loaded.watermark()["id"].numpy().decode() == last.id
    table = de.DynamicVariable(8, name="table/embeddings")
    de.load(copy, {"table/embeddings": table}, dense=None)
    assert len(table) == len(np.unique(inputs))

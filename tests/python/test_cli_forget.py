"""The commands forget and audit on dumps, deltas and SavedModels."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from chain_writer import Change, Row, publish
from cli_helpers import FORMS, changes, damage, fails, run, state_of, write_chain
from test_storage_crash import CrashError, crash_before

import tf_dynemb as de
from tf_dynemb import cli
from tf_dynemb.chains import counters
from tf_dynemb.chains import forget as chains_forget
from tf_dynemb.cli import merge
from tf_dynemb.format import key_index
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain, Snapshot


@pytest.fixture
def path(tmp_path):
    write_chain(tmp_path / "chain")
    return tmp_path / "chain"


def contents(folder):
    return {
        file.relative_to(folder): file.read_bytes()
        for file in sorted(pathlib.Path(folder).rglob("*"))
        if file.is_file() and file.name != "LOCK"
    }


def is_in_a_file(folder, value):
    return any(np.float32(value).tobytes() in data for data in contents(folder).values())


def audit(capsys, key, *paths, table=None):
    """Returns the exit code and what was found, as (what, table)."""
    more = [] if table is None else ["--table", table]
    code, out = run(capsys, "audit", key, *paths, "--json", *more)
    return code, json.loads(out)


def kinds(found):
    return sorted((each["what"], each["table"]) for each in found["copies"])


@pytest.mark.parametrize("ranks", [1, 3])
def test_forget(capsys, tmp_path, ranks):
    path = tmp_path / "chain"
    write_chain(path, ranks)
    reader = Reader(path)
    expected = state_of(path, "user")
    other = state_of(path, "item/ü")
    ids = [snapshot.manifest.id for snapshot in Chain.open(path).snapshots]
    assert kinds(audit(capsys, 2, path, table="user")[1]) == [("row", "user")] * 3
    code, out = run(capsys, "forget", path, "--keys", "2", "5", "12345", "--table", "user")
    assert code == 0
    assert out.splitlines() == [
        f"{snapshot.directory}: table 'user': rows removed: {n}"
        for snapshot, n in zip(Chain.open(path).snapshots, (1, 1, 2), strict=True)
    ]
    for key in (2, 5):
        del expected[key]
    assert state_of(path, "user") == expected
    assert state_of(path, "item/ü") == other
    assert [snapshot.manifest.id for snapshot in Chain.open(path).snapshots] == ids
    assert run(capsys, "verify", path)[0] == 0
    for state in (20.5, 50.5):  # of the optimizer
        assert not is_in_a_file(path, state)
    for key in (2, 5):
        assert audit(capsys, key, path, table="user")[0] == 0
        assert kinds(audit(capsys, key, path)[1])[0] == ("row", "item/ü")
    before = contents(path)
    again = run(capsys, "forget", path, "--keys", "2", "5", "--table", "user")
    assert again == (0, "nothing to remove\n")
    assert contents(path) == before
    assert [entry.name for entry in path.iterdir() if entry.name.startswith(".")] == []
    # A reader that was open still has the rows, and follows; a new reader does not have them.
    assert reader.contains([2, 4], "user").tolist() == [True, True]
    publish(
        path,
        "delta",
        changes({7: 7}, deleted=[2], tick=350),
        forms=FORMS,
        parent=ids[-1],
        since=300,
        watermark=400,
    )
    assert reader.follow() == 1
    assert reader.contains([2, 4, 7], "user").tolist() == [False, True, True]
    assert Reader(path).contains([2, 5, 4, 7], "user").tolist() == [False, False, True, True]


def test_forget_in_every_table_that_is_named(capsys, path):
    arguments = ["forget", path, "--keys", "2"]
    before = contents(path)
    error = fails(capsys, 2, *arguments)
    assert "'user', 'item/ü'" in error
    assert "--table" in error
    assert "'x'" in fails(capsys, 2, *arguments, "--table", "x")
    assert "'bob' is not an integer" in fails(
        capsys, 2, "forget", path, "--keys", "2", "bob", "--table", "user"
    )
    assert "no keys" in fails(capsys, 2, "forget", path, "--table", "user")
    assert contents(path) == before
    run(capsys, *arguments, "--table", "user", "--table", "item/ü")
    assert audit(capsys, 2, path)[0] == 0
    assert set(state_of(path, "user")) == set(state_of(path, "item/ü")) == {1, 4, 5}


def test_keys_of_all_options(capsys, path, tmp_path):
    """None is lost, and a file adds to the others."""
    file = tmp_path / "keys"
    file.write_text("4\n")
    arguments = ["--keys", "1", "--table", "user", "--keys=2", "--keys", "5", "--key-file", file]
    run(capsys, "forget", path, *arguments)
    assert state_of(path, "user") == {}


def test_dumps_of_earlier_versions(capsys, tmp_path):
    golden = pathlib.Path(__file__).parent / "golden"
    count = 0
    for version in ("v1", "v2", "v3"):
        path = tmp_path / version
        shutil.copytree(golden / version / "chain", path)
        for snapshot in Chain.open(path).snapshots:
            snapshot = Snapshot(snapshot.directory)  # an earlier round may have replaced files
            entry = snapshot.manifest.tables[0]
            keys = snapshot.column(0, "keys", entry.shards[0].rank)
            key, table = int(keys[0]), entry.name
            run(capsys, "forget", path, f"--keys={key}", "--table", table, "--deletions")
            assert audit(capsys, key, path, table=table)[0] == 0
            assert run(capsys, "verify", path)[0] == 0
            assert not Reader(path).contains(key, table)
            count += 1
    assert count >= 6


def test_lists_of_deleted_keys(capsys, path, tmp_path):
    """Readers that have the row need them; they go when they are told to."""
    late = Chain.open(path).base.directory
    shutil.copytree(late, tmp_path / "late" / late.name)
    reader = Reader(tmp_path / "late")
    # The delta that lists 3 as deleted has a row of 4, and is rewritten.
    code, out = run(capsys, "forget", path, "--keys", "3", "4", "--table", "user")
    assert code == 0
    assert "1 snapshots still list keys as deleted" in out
    assert set(state_of(path, "user")) == {1, 2, 5}
    assert kinds(audit(capsys, 3, path, table="user")[1]) == [("deleted", "user")]
    assert reader.contains(3, "user")
    reader.follow(path)
    assert not reader.contains(3, "user")
    code, out = run(capsys, "forget", path, "--keys", "3", "--table", "user", "--deletions")
    assert code == 0
    assert "table 'user': removed from the deleted keys" in out
    assert audit(capsys, 3, path, table="user")[0] == 0
    assert run(capsys, "verify", path)[0] == 0
    # The other deleted key of the list stays.
    assert kinds(audit(capsys, 77, path, table="user")[1]) == [("deleted", "user")]


def test_the_last_row_of_a_table(capsys, tmp_path):
    publish(tmp_path, "base", {"t": Change({5: Row(np.ones(3, np.float32))})}, watermark=1)
    run(capsys, "forget", tmp_path, "--keys", "5")
    reader = Reader(tmp_path)
    assert (reader.size(), reader.contains(5)) == (0, False)
    assert run(capsys, "verify", tmp_path)[0] == 0


def test_large_tables(capsys, tmp_path, monkeypatch):
    """More rows than one iteration handles, in all key types."""
    monkeypatch.setattr(chains_forget, "_CHUNK", 7)
    rng = np.random.default_rng(1)
    for key_type in ("int64", "int32", "uint64"):
        info = np.iinfo(key_type)
        keys = np.unique(rng.integers(info.min, info.max, 300, dtype=key_type))
        held = {int(key): Row(np.full(3, i, np.float32)) for i, key in enumerate(keys)}
        path = tmp_path / key_type
        form = {"t": FORMS["user"].__class__(3, key_type)}
        publish(path, "base", {"t": Change(held)}, forms=form, ranks=2, watermark=1)
        gone = keys[::3]
        file = tmp_path / "keys"
        file.write_text("\n".join(map(str, gone)))
        run(capsys, "forget", path, "--key-file", file)
        reader = Reader(path)
        expected = ~np.isin(keys, gone)
        assert reader.contains(keys).tolist() == expected.tolist()
        assert reader.lookup(keys, default=-1)[:, 1].tolist() == [
            float(i) if kept else -1.0 for i, kept in enumerate(expected)
        ]
        assert run(capsys, "verify", path)[0] == 0


def test_hard_links_do_not_change_and_are_found(capsys, path, tmp_path):
    copy = tmp_path / "models" / "copy"
    shutil.copytree(path, copy, copy_function=os.link)
    shutil.copytree(path, tmp_path / "elsewhere", copy_function=os.link)
    before = contents(copy)
    code, found = audit(capsys, 1, path, tmp_path / "models", table="user")
    assert code == 1
    first, second = found["copies"]
    assert (first["same_file_as"], second["same_file_as"]) == (None, first["file"])
    assert found["other_links"] == [{"file": first["file"], "links": 1}]
    text = run(capsys, "audit", "1", path, tmp_path / "models", "--table", "user")[1]
    assert f"(the same file as {first['file']})" in text
    assert "1 more hard links" in text
    run(capsys, "forget", path, "--keys", "1", "--table", "user")
    assert contents(copy) == before
    assert Reader(copy).contains(1, "user")
    code, found = audit(capsys, 1, path, tmp_path / "models", table="user")
    assert [each["same_file_as"] for each in found["copies"]] == [None]
    assert found["other_links"][0]["links"] == 1
    run(capsys, "forget", tmp_path, "--keys", "1", "--table", "user")  # all that is below it
    assert audit(capsys, 1, tmp_path, table="user")[0] == 0


def test_one_snapshot_and_snapshots_that_are_superseded(capsys, path, tmp_path):
    base = Chain.open(path).base.directory
    alone = tmp_path / "alone"
    shutil.copytree(base, alone)
    run(capsys, "forget", alone, "--keys", "1", "--table", "user")
    assert set(state_of(alone, "user")) == {2, 3, 6}
    merge.merge(path, None, 5)
    assert len([entry for entry in path.iterdir() if entry.is_dir()]) == 4
    run(capsys, "forget", path, "--keys", "1", "--table", "user")
    assert audit(capsys, 1, path, table="user")[0] == 0


def test_damage_is_found_before_the_first_change(capsys, path):
    last = Chain.open(path).last.directory
    damage(last / "000.r0.vectors.npy", 130)
    before = contents(path)
    error = fails(capsys, 1, "forget", path, "--keys", "2", "--table", "user")
    assert "000.r0.vectors.npy" in error
    assert contents(path) == before
    damage(last / "000.r0.vectors.npy", 130)
    damage(last / "000.r0.keys.npy", 130)
    assert "keys.npy" in fails(capsys, 1, "forget", path, "--keys", "1", "--table", "user")
    assert contents(path) != before  # the damage only
    code, found = audit(capsys, 1, path, table="user")
    assert code == 1
    assert [each["path"] for each in found["not_examined"]] == [str(last)]
    assert len(found["copies"]) == 1


def test_while_another_process_writes(capsys, path):
    with de.storage.Publication(path, "base"):
        error = fails(capsys, 2, "forget", path, "--keys", "1", "--table", "user")
    assert "another process writes" in error
    assert 1 in state_of(path, "user")


def test_remains_of_dumps(capsys, path):
    left = path / f".tmp-{'0123' * 8}"
    shutil.copytree(Chain.open(path).base.directory, left)
    (left / "MANIFEST.json").unlink()
    content = (left / "000.r0.keys.npy").read_bytes()
    (left / "000.r0.keys.npy").write_bytes(bytes(128) + content[128:])  # before it was closed
    found = audit(capsys, 1, path, table="user")[1]
    assert {each["what"] for each in found["copies"]} == {"row", "remains"}
    assert [each["path"] for each in found["not_examined"]] == [str(left)]
    # Files and folders of others stay.
    others = [path / ".tmp-0123", path.parent / left.name, path / f".tmp-{'abcd' * 8}"]
    for other in others:
        other.mkdir()
        (other / "mine.txt").touch()
    snapshot = path.parent / f".tmp-{'4567' * 8}"  # not at a chain: somebody has named it so
    shutil.copytree(Chain.open(path).base.directory, snapshot)
    backup = Chain.open(path).base.directory / "MANIFEST.json.bak"
    backup.touch()
    run(capsys, "forget", path.parent, "--keys", "1", "--table", "user")
    assert not left.exists()
    assert backup.exists()
    assert set(state_of(snapshot, "user")) == {2, 3, 6}
    assert all((other / "mine.txt").exists() for other in others)
    assert audit(capsys, 1, path.parent, table="user")[0] == 0


STEPS = ["os.write", "os.pwrite", "os.fsync", "os.rename", "os.replace", "os.mkdir", "os.unlink"]


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_before_each_step(capsys, tmp_path, step):
    """The chain is as before, or as after it, and a second run ends the work."""
    for call in range(100):
        path = tmp_path / str(call)
        write_chain(path)
        before = {name: state_of(path, name) for name in FORMS}
        after = {key: row for key, row in before["user"].items() if key != 2}
        crashed = False
        with pytest.MonkeyPatch.context() as patch:
            crash_before(patch, step, call)
            # A killed process would not run the clean-up.
            patch.setattr(chains_forget, "remove_tree", lambda folder: True)
            patch.setattr(pathlib.Path, "unlink", lambda self, **_: os.unlink(self))
            try:
                cli.main(["forget", str(path), "--keys", "2", "--table", "user"])
            except CrashError:
                crashed = True
        capsys.readouterr()
        state = state_of(path, "user")
        # The base first: the last delta's row is read until all of them have lost it.
        assert state in (before["user"], after)
        assert state_of(path, "item/ü") == before["item/ü"]
        assert run(capsys, "verify", path)[0] == 0
        if state == after:
            assert {what for what, _ in kinds(audit(capsys, 2, path, table="user")[1])} <= {
                "remains"
            }
        run(capsys, "forget", path, "--keys", "2", "--table", "user")
        assert state_of(path, "user") == after
        assert audit(capsys, 2, path, table="user")[0] == 0
        assert not is_in_a_file(path, 20.5)
        if not crashed:
            break
    assert not crashed
    assert call > 2


def test_without_tensorflow(path):
    code = (
        "import sys; sys.modules['tensorflow'] = None; sys.modules['keras'] = None;"
        "from tf_dynemb import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    for arguments, expected in (
        (["forget", str(path), "--keys", "2", "--table", "user"], 0),
        (["audit", "2", str(path), "--table", "user"], 0),
        (["audit", "1", str(path)], 1),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, timeout=60, check=False
        )
        assert done.returncode == expected, done.stderr


def test_dense_variables(capsys, tmp_path):
    dense = de.Variable(np.ones((4, 2), np.float32), name="dense")
    table = de.DynamicVariable(2, name="user")
    table.lookup([1, 2, 3])
    de.dump(tmp_path, [table, dense])
    before = contents(tmp_path)
    error = fails(capsys, 2, "forget", tmp_path, "--keys", "1", "--table", "dense")
    assert "matrix" in error
    assert contents(tmp_path) == before
    run(capsys, "forget", tmp_path, "--keys", "1", "--table", "user")
    de.load(tmp_path, [table, dense])
    assert table.contains([1, 2, 3]).numpy().tolist() == [False, True, True]


def test_training_continues_the_chain(capsys, tmp_path):
    """Ids stay: deltas continue, with optimizer state, and the next process loads the rest."""
    table = de.DynamicVariable(2, name="user")
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.lookup(ids))
        optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))

    step([1, 2, 3])
    de.dump(tmp_path, table, optimizer)
    step([1, 2, 4])
    table.forget([2])
    de.incremental_dump(tmp_path, table, optimizer=optimizer)
    run(capsys, "forget", tmp_path, "--keys", "2")
    step([3, 5])
    de.incremental_dump(tmp_path, table, optimizer=optimizer)
    assert run(capsys, "verify", tmp_path)[0] == 0
    loaded = de.DynamicVariable(2, name="user")
    other = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
    de.load(tmp_path, loaded, other)
    keys = [1, 2, 3, 4, 5]
    assert loaded.contains(keys).numpy().tolist() == [True, False, True, True, True]
    found, expected = (t.lookup([1, 3, 4, 5], insert=False) for t in (loaded, table))
    np.testing.assert_array_equal(found, expected)


def test_admission_counters(capsys, tmp_path):
    options = {"admission": de.Frequency(5), "name": "user"}
    table = de.DynamicVariable(2, **options)
    table.lookup([7, 8, 9])
    table.lookup([7, 8, 9])
    for _ in range(5):
        table.lookup([1])
    de.dump(tmp_path, table)
    assert kinds(audit(capsys, 7, tmp_path)[1]) == [("counter", "user")]
    run(capsys, "forget", tmp_path, "--keys", "7", "1")
    assert audit(capsys, 7, tmp_path)[0] == 0
    assert run(capsys, "verify", tmp_path)[0] == 0
    loaded = de.DynamicVariable(2, **options)
    de.load(tmp_path, loaded)
    counts = [each.admission_count for each in loaded.explain([7, 8, 9, 1])]
    assert counts == [0, 2, 2, 0]


def test_a_counter_leaves_the_others_of_its_line():
    """Lines as docs/file_format.md has them: entries of 22 bits, the last counted first."""
    keys = np.arange(40, dtype=np.int64)
    fingerprints = [int(each) >> 50 for each in key_index.mix(keys, 0xA24BAED4963EE407)]
    assert len(set(fingerprints)) == 40

    def line(line_keys):
        number = sum((fingerprints[k] << 8 | (k + 1)) << 22 * e for e, k in enumerate(line_keys))
        return np.frombuffer(number.to_bytes(64, "little"), "<u8")[np.newaxis]

    full = list(range(23))
    for gone in ([0], [22], [11], [3, 4, 20], [30], full):
        left = [key for key in full if key not in gone]
        lines = line(full)
        found = counters.without(lines, keys[gone], 0, 1)
        np.testing.assert_array_equal(found, line(left))
        assert counters.counted(lines, keys[gone], 0, 1) == 23 - len(left)
        assert counters.counted(found, keys[gone], 0, 1) == 0
        np.testing.assert_array_equal(lines, line(full))


STRINGS = ["alice", "bob", "Zoë 花子", "12"]


@pytest.mark.parametrize("how", ["copy", "link", "external"])
def test_saved_models_and_strings(capsys, tmp_path, how):
    inputs = keras.Input((1,), dtype="string")
    layer = de.layers.Embedding(3, hash_strings=True, name="user", initializer="ones")
    model = keras.Model(inputs, keras.layers.Flatten()(layer(inputs)))
    layer(tf.constant([STRINGS]), training=True)
    layer.table.upsert(STRINGS, np.full((4, 3), 1234.5, np.float32))
    de.dump(tmp_path / "dump", model)
    source = None if how == "copy" else tmp_path / "dump"
    watermark = de.export_saved_model(model, tmp_path / "model", how, source)
    served = tf.saved_model.load(str(tmp_path / "model"))
    words = tf.constant([["alice"], ["bob"], ["12"]])
    assert served.serve(words).numpy()[:, 0].tolist() == [1234.5] * 3
    found = audit(capsys, "alice", tmp_path / "model")[1]
    assert kinds(found) == [("row", "user/embeddings")]
    assert [each["links"] for each in found["other_links"]] == ([1] if how == "link" else [])
    code, out = run(capsys, "forget", tmp_path / "model", "--keys", "alice", "12")
    assert code == 0
    assert "rows removed: 2" in out
    assert audit(capsys, "alice", tmp_path / "model")[0] == 0
    assert audit(capsys, "alice", tmp_path)[0] == (0 if how == "external" else 1)
    # The model that was loaded has mapped the rows, and goes on.
    assert served.serve(words).numpy()[:, 0].tolist() == [1234.5] * 3
    again = tf.saved_model.load(str(tmp_path / "model"))
    assert again.serve(words).numpy()[:, 0].tolist() == [1.0, 1234.5, 1.0]
    # Deltas continue it.
    layer.table.forget(["bob"])
    de.incremental_dump(tmp_path / "deltas", model, since=watermark)
    again.signatures["apply_delta"](path=tf.constant(str(tmp_path / "deltas")))
    assert again.serve(words).numpy()[:, 0].tolist() == [1.0, 1.0, 1.0]


def test_paths_without_anything(capsys, tmp_path):
    assert "no snapshot" in fails(capsys, 2, "forget", tmp_path, "--keys", "1")
    assert "not a folder" in fails(capsys, 2, "audit", "1", tmp_path / "no")
    assert audit(capsys, 1, tmp_path) == (
        0,
        {"places": 0, "copies": [], "other_links": [], "not_examined": []},
    )

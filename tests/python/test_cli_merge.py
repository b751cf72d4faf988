"""The commands merge and export, and blocks of large tables."""

from __future__ import annotations

import csv
import subprocess
import sys

import numpy as np
import pytest
from chain_writer import Change, Row, publish
from cli_helpers import (
    FORMS,
    NUMBERS,
    changes,
    damage,
    fails,
    row,
    run,
    state_of,
    write_chain,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_dynemb import cli
from tf_dynemb.chains import rows as chain_rows
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain


@pytest.fixture
def path(tmp_path):
    write_chain(tmp_path / "chain")
    return tmp_path / "chain"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_merge(capsys, tmp_path, ranks, in_place):
    path = tmp_path / "chain"
    third = write_chain(path, ranks)[2]
    before = {name: state_of(path, name) for name in FORMS}
    assert {key: bits[2] for key, bits in before["user"].items()} == {
        1: 100,
        2: 250,
        4: 150,
        5: 250,
    }
    reader = Reader(path)
    out = path if in_place else tmp_path / "out"
    code, printed = run(capsys, "merge", path, "--in-place" if in_place else out)
    assert code == 0
    merged = Chain.open(out)
    assert printed == f"{merged.base.directory}\n"
    assert merged.deltas == []
    assert {name: state_of(out, name) for name in FORMS} == before
    manifest, last = merged.base.manifest, third.manifest
    assert manifest.id != last.id
    assert (manifest.watermark, manifest.watermark_utc_ns) == (300, last.watermark_utc_ns)
    assert manifest.continues == (last.id,)
    assert manifest.optimizer == last.optimizer
    assert manifest.world_size == ranks
    assert [len(table.shards) for table in manifest.tables] == [ranks, ranks]
    for entry, was in zip(manifest.tables, last.tables, strict=True):
        assert (entry.state, entry.initializer, entry.seed) == (
            was.state,
            was.initializer,
            was.seed,
        )
    assert run(capsys, "verify", out)[0] == 0
    if in_place:
        assert len([d for d in path.iterdir() if d.is_dir()]) == 1
        assert run(capsys, "merge", path, "--in-place")[0] == 0
        assert Chain.open(path).base.manifest.id == manifest.id
        assert reader.follow() == 1
    else:
        assert len(Chain.open(path).deltas) == 2
        assert "already contains snapshots" in fails(capsys, 2, "merge", path, out)
        assert run(capsys, "verify", path)[0] == 0


@pytest.mark.parametrize("parent_is_merged", [False, True])
def test_deltas_continue_a_merged_base(capsys, path, tmp_path, parent_is_merged):
    last = Chain.open(path).last.manifest.id
    out, copy, deltas = tmp_path / "out", tmp_path / "copy", tmp_path / "deltas"
    run(capsys, "merge", path, out)
    run(capsys, "merge", out, copy)  # a merge of a lone base continues it
    merged = Chain.open(out).base.manifest.id
    readers = [Reader(out), Reader(copy)]
    for where in (out, copy, deltas):
        publish(
            where,
            "delta",
            changes({1: 99}, deleted=[2], tick=350),
            forms=FORMS,
            parent=merged if parent_is_merged else last,
            since=300,
            watermark=400,
        )
    assert readers[0].follow(deltas) == 1
    assert readers[1].follow() == 1
    for reader in (*readers, Reader(out), Reader(copy)):
        assert reader.watermark == 400
        assert reader.lookup([1, 2, 4], "user", default=-1)[:, 0].tolist() == [99, -1, 40]
    for where in (out, copy):
        assert len(Chain.open(where).deltas) == 1
        assert run(capsys, "verify", where)[0] == 0


def test_a_delta_of_an_older_snapshot_does_not_continue_a_merge(capsys, path, tmp_path):
    second = Chain.open(path).deltas[0].manifest.id
    run(capsys, "merge", path, tmp_path / "out")
    with pytest.raises(ValueError, match="gap"):
        publish(
            tmp_path / "out", "delta", changes({}), forms=FORMS, parent=second, since=0, watermark=9
        )


def test_merge_refuses_damaged_files(capsys, path, tmp_path):
    damage(Chain.open(path).base.directory / "000.r0.state.npy", 140)
    assert "state" in fails(capsys, 1, "merge", path, "--in-place")
    assert len(Chain.open(path).deltas) == 2
    assert "state" in fails(capsys, 1, "merge", path, tmp_path / "out")


def test_merge_refuses_times_that_do_not_fit(capsys, tmp_path):
    value = Row(np.zeros(3, np.float32), update=5, access=5)
    late = Row(np.zeros(3, np.float32), update=2**32 + 5, access=2**32 + 5)
    base = publish(tmp_path, "base", {"t": Change({1: value})}, watermark=5)
    publish(
        tmp_path,
        "delta",
        {"t": Change({2: late})},
        base_tick=2**32,
        parent=base.manifest.id,
        since=5,
        watermark=2**33,
    )
    assert "ticks" in fails(capsys, 2, "merge", tmp_path, "--in-place")
    assert len(Chain.open(tmp_path).deltas) == 1


KEYS = st.integers(0, 9)


STEPS = st.lists(
    st.tuples(st.dictionaries(KEYS, st.integers(0, 200)), st.sets(KEYS), st.integers(1, 3)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30)
@given(steps=STEPS)
def test_merge_of_random_chains(tmp_path_factory, steps):
    """Different numbers of ranks write the snapshots, so a key may move between shards."""
    path = tmp_path_factory.mktemp("chain")
    model, parent = {}, None
    for number, (updates, deleted, ranks) in enumerate(steps):
        tick = 10 * number + 1
        gone = deleted - set(updates) if parent else set()
        for key in gone:
            model.pop(key, None)
        held = {key: row(FORMS["user"], value, tick) for key, value in updates.items()}
        model.update(held)
        times = {"watermark": tick + 5}
        if parent:
            times |= {"parent": parent.manifest.id, "since": tick - 5}
        parent = publish(
            path,
            "delta" if parent else "base",
            {"user": Change(held, gone)},
            forms=FORMS,
            ranks=ranks,
            base_tick=tick,
            **times,
        )
    expected = {
        key: (r.vector.tobytes(), np.float32(r.state).tobytes(), r.update, r.access)
        for key, r in model.items()
    }
    assert state_of(path, "user") == expected
    assert cli.main(["merge", str(path), str(path / "out")]) == 0
    assert cli.main(["verify", str(path / "out")]) == 0
    assert state_of(path / "out", "user") == expected
    assert cli.main(["diff", str(path), str(path / "out")]) == 0


def test_blocks_of_large_tables(capsys, tmp_path, monkeypatch):
    """More rows than one iteration handles, in merge and diff."""
    monkeypatch.setattr(chain_rows, "CHUNK", 7)
    held = {key: Row(np.full(3, key, np.float32), update=key) for key in range(100)}
    base = publish(tmp_path / "a", "base", {"t": Change(held)}, ranks=2, watermark=200)
    update = {key: Row(np.full(3, -key, np.float32), update=key) for key in range(50, 120)}
    publish(
        tmp_path / "a",
        "delta",
        {"t": Change(update, range(10))},
        ranks=3,
        parent=base.manifest.id,
        since=200,
        watermark=300,
    )
    assert run(capsys, "merge", tmp_path / "a", tmp_path / "b")[0] == 0
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b")[0] == 0
    reader = Reader(tmp_path / "b")
    keys = np.arange(130)
    expected = np.select([keys < 10, keys < 50, keys < 120], [-1, keys, -keys], -1)
    assert reader.lookup(keys, default=-1)[:, 2].tolist() == expected.tolist()


def test_export_npz(capsys, path, tmp_path):
    file = tmp_path / "vectors.npz"
    code, out = run(capsys, "export", path, "--output", file)
    assert (code, out) == (0, "user: 4 keys\nitem/ü: 4 keys\n")
    with np.load(file) as arrays:
        assert set(arrays) == {f"{name}/{what}" for name in FORMS for what in ("keys", "vectors")}
        for name, form in FORMS.items():
            keys, vectors = arrays[f"{name}/keys"], arrays[f"{name}/vectors"]
            assert keys.dtype == form.key_type
            assert vectors.dtype == np.float32
            assert vectors.shape == (4, form.dimension)
            assert dict(zip(keys.tolist(), vectors[:, -1].tolist(), strict=True)) == NUMBERS
    assert "--force" in fails(capsys, 2, "export", path, file, "--table", "user")
    run(capsys, "export", path, file, "--table", "user", "--force")
    with np.load(file) as arrays:
        assert set(arrays) == {"user/keys", "user/vectors"}
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == [file.name]


def test_export_parquet(capsys, path, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "vectors.parquet"
    assert "--table" in fails(capsys, 2, "export", path, "--output", file)
    for name, form in FORMS.items():
        assert run(capsys, "export", path, file, "--table", name, "--force")[0] == 0
        table = parquet.read_table(file)
        assert table.column_names == ["key", "vector"]
        assert str(table.schema.field("key").type) == form.key_type
        vector_type = table.schema.field("vector").type
        assert pyarrow.types.is_fixed_size_list(vector_type)
        assert (vector_type.list_size, str(vector_type.value_type)) == (form.dimension, "float")
        rows = table.to_pylist()
        assert {r["key"]: r["vector"] for r in rows} == {
            key: [number] * form.dimension for key, number in NUMBERS.items()
        }


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_export_of_all_tables_to_a_folder(capsys, path, tmp_path, form):
    folder = tmp_path / "out"
    assert "--format" in fails(capsys, 2, "export", path, folder)
    for _ in range(2):
        code, out = run(capsys, "export", path, folder, "--format", form, "--force")
        assert (code, out) == (0, "user: 4 keys\nitem/ü: 4 keys\n")
    assert "--force" in fails(capsys, 2, "export", path, folder, "--format", form)
    files = {"user": f"user.{form}", "item/ü": f"item%2F%C3%BC.{form}"}
    assert sorted(file.name for file in folder.iterdir()) == sorted(files.values())
    for name, file in files.items():
        dimension = FORMS[name].dimension
        assert _vectors(folder / file) == {k: [float(n)] * dimension for k, n in NUMBERS.items()}
    (folder / "mine.txt").touch()
    assert "mine.txt" in fails(capsys, 2, "export", path, folder, "--format", form, "--force")
    assert len(list(folder.iterdir())) == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chain", "out"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(capsys, "export", path, empty, "--format", form, "--table", "user")[0] == 0
    assert [file.name for file in empty.iterdir()] == [files["user"]]


def _vectors(file):
    if file.suffix == ".parquet":
        rows = pytest.importorskip("pyarrow.parquet").read_table(file).to_pylist()
        return {row["key"]: row["vector"] for row in rows}
    with file.open(newline="") as opened:
        head, *rows = csv.reader(opened)
    assert head == ["key", *(f"vector_{i}" for i in range(len(head) - 1))]
    return {int(row[0]): list(map(float, row[1:])) for row in rows}


def test_export_csv_keeps_every_bit(capsys, tmp_path):
    """Numbers that need all digits of a float32, and those that are not finite."""
    numbers = np.random.default_rng(0).integers(0, 2**32, (300, 3), np.uint32).view(np.float32)
    numbers[0] = [np.inf, -np.inf, -0.0]
    held = {key - 2**63: Row(vector) for key, vector in enumerate(numbers)}
    publish(tmp_path / "chain", "base", {"t": Change(held)}, watermark=1)
    file = tmp_path / "t.csv"
    assert run(capsys, "export", tmp_path / "chain", file)[0] == 0
    found = _vectors(file)
    assert len(found) == 300
    for key, written in held.items():
        np.testing.assert_array_equal(np.float32(found[key]), written.vector)
    assert "--table" not in fails(capsys, 2, "export", tmp_path / "chain", file)


@pytest.mark.parametrize("name", ["x.txt", "x.npy", "x.parquet.gz", "x"])
def test_export_refuses_other_endings(capsys, path, tmp_path, name):
    error = fails(capsys, 2, "export", path, tmp_path / name)
    assert ".npz, .csv, .parquet" in error
    assert "--format" in error
    run(capsys, "export", path, tmp_path / name, "--format", "npz")
    with np.load(tmp_path / name) as arrays:
        assert len(arrays) == 4


def test_export_of_several_tables_to_one_file(capsys, path, tmp_path):
    for form in ("csv", "parquet"):
        error = fails(capsys, 2, "export", path, tmp_path / f"x.{form}")
        assert "'user', 'item/ü'" in error
        assert f"{tmp_path / 'x'} --format {form}" in error
    folder = tmp_path / "x.csv"
    folder.mkdir()
    assert "folder" in fails(capsys, 2, "export", path, folder, "--table", "user", "--force")
    (tmp_path / "y").touch()
    assert "a file is there" in fails(
        capsys, 2, "export", path, tmp_path / "y", "--format", "csv", "--force"
    )


def test_export_parquet_without_pyarrow(capsys, path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arguments = ["--table", "user", "--format", "parquet", "--output", tmp_path / "f"]
    assert "needs pyarrow" in fails(capsys, 2, "export", path, *arguments)
    assert not (tmp_path / "f").exists()


def test_as_a_module(path):
    """In a separate process: without TensorFlow, and without a traceback."""
    code = (
        "import sys, runpy; sys.modules['tensorflow'] = None; sys.modules['keras'] = None;"
        "sys.argv[0] = 'tf_dynemb'; runpy.run_module('tf_dynemb', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "snapshots: 3, problems: 0\n"), done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "tf_dynemb", "inspect", str(path / "nothing")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_nothing_is_replaced_without_being_asked(capsys, path, tmp_path):
    before = sorted(path.rglob("*"))
    assert "--in-place" in fails(capsys, 2, "merge", path)
    assert "--in-place" in fails(capsys, 2, "merge", path, tmp_path / "out", "--in-place")
    assert "already contains snapshots" in fails(capsys, 2, "merge", path, path)
    assert "needs OUT" in fails(capsys, 2, "export", path)
    assert "needs OUT" in fails(
        capsys, 2, "export", path, tmp_path / "a.npz", "--output", tmp_path / "b.npz"
    )
    assert sorted(path.rglob("*")) == before
    assert [file for file in tmp_path.iterdir() if file.is_file()] == []

"""The commands forget and audit on the flushes of persistent tables."""

from __future__ import annotations

import gc
import os
import shutil

import numpy as np
import pytest
from cli_helpers import fails, run
from test_cli_forget import audit, contents, kinds
from test_persistent_forget import FORGOTTEN, check, flushed
from test_persistent_tables import fill, make
from test_storage_crash import CrashError, crash_before

import tf_dynemb as de
from tf_dynemb import cli
from tf_dynemb.chains import flushes

MARK = np.float32(1234567.5)
KEYS = [str(key) for key in FORGOTTEN]


def flush_with_marks(path, rows=500):
    """A flush in which the rows of FORGOTTEN have values that no other row has; some moved."""
    table = make(path)
    fill(table, FORGOTTEN, MARK)
    fill(table, np.setdiff1d(np.arange(rows), FORGOTTEN), 3)
    table.lookup(FORGOTTEN[:40])  # moves them to memory, and leaves copies behind
    table.flush()
    del table
    gc.collect()
    return path / "t.persistent"


def marks_in(folder):
    return sum(data.count(MARK.tobytes()) for data in contents(folder).values())


def test_forget_in_a_flush(capsys, tmp_path):
    folder = flush_with_marks(tmp_path)
    assert marks_in(folder) >= 4 * len(FORGOTTEN)
    code, found = audit(capsys, 150, tmp_path)
    assert code == 1
    assert ("row", "t") in kinds(found)
    flushes_before = sorted(os.listdir(folder))
    code, out = run(capsys, "forget", tmp_path, "--keys", *KEYS)
    assert code == 0
    assert "table 't': rows removed: " in out
    assert sorted(os.listdir(folder)) == flushes_before
    assert marks_in(folder) == 0
    assert audit(capsys, 150, tmp_path)[0] == 0
    assert run(capsys, "forget", tmp_path, "--keys", *KEYS)[1] == "nothing to remove\n"
    table = make(tmp_path)
    check(table, np.setdiff1d(np.arange(500), FORGOTTEN))
    fill(table, FORGOTTEN, 3)
    table.flush()
    del table
    gc.collect()
    assert len(make(tmp_path)) == 500


def test_keys_that_were_forgotten_before(capsys, tmp_path):
    """The rows that a table has noted as forgotten are in the files until they are removed."""
    table = flushed(tmp_path)
    table.forget([1, 2, 3])
    del table
    gc.collect()
    assert set(kinds(audit(capsys, 2, tmp_path)[1])) == {("forgotten", "t"), ("row", "t")}
    run(capsys, "forget", tmp_path, "--keys", "2")
    assert audit(capsys, 2, tmp_path)[0] == 0
    assert ("forgotten", "t") in kinds(audit(capsys, 3, tmp_path)[1])
    table = make(tmp_path)
    assert table.contains(np.arange(6)).numpy().tolist() == [True, False, False, False, True, True]
    assert len(table) == 497


def test_a_table_that_is_in_use(capsys, tmp_path):
    table = flushed(tmp_path)
    error = fails(capsys, 2, "forget", tmp_path, "--keys", "7")
    assert "table.forget(keys)" in error
    assert table.contains([7]).numpy()[0]
    code, found = audit(capsys, 7, tmp_path)
    assert code == 1
    assert ("row", "t") in kinds(found)
    assert any("running process" in each["why"] for each in found["not_examined"])


def test_copies_by_links_do_not_change(capsys, tmp_path):
    folder = flush_with_marks(tmp_path / "files")
    shutil.copytree(folder, tmp_path / "copy" / folder.name, copy_function=os.link)
    before = contents(tmp_path / "copy")
    found = audit(capsys, 150, tmp_path)[1]
    assert any(each["same_file_as"] for each in found["copies"])
    run(capsys, "forget", tmp_path / "files", "--keys", *KEYS)
    assert contents(tmp_path / "copy") == before
    assert len(make(tmp_path / "copy")) == 500
    gc.collect()
    check(make(tmp_path / "files"), np.setdiff1d(np.arange(500), FORGOTTEN))


def test_dumps_and_flushes_together(capsys, tmp_path):
    table = flushed(tmp_path / "rows")
    de.dump(tmp_path / "dump", {"t": table}, quiet=True)
    del table
    gc.collect()
    run(capsys, "forget", tmp_path, "--keys", "7", "8")
    assert audit(capsys, 7, tmp_path)[0] == 0
    assert len(make(tmp_path / "rows")) == de.serving.Reader(tmp_path / "dump").size() == 498


@pytest.mark.parametrize("dim", [1, 4, 33, 300, 2000])
def test_rows_of_all_sizes(capsys, tmp_path, dim):
    """Units have one to eight blocks, as cc/file/segment.cc decides."""
    options = {
        "var_type": "file",
        "file_path": tmp_path,
        "max_dram_for_vectors": 1e-3,
        "persistent": True,
        "name": "t",
    }
    table = de.DynamicVariable(dim, **options)
    keys = np.arange(-50, 50)
    table.upsert(keys, np.repeat(keys[:, np.newaxis], dim, 1).astype(np.float32))
    table.flush()
    del table
    gc.collect()
    found = audit(capsys, -7, tmp_path)[1]
    assert kinds(found) == [("row", "t")]
    run(capsys, "forget", tmp_path, "--keys=-7", "--keys=8")
    run(capsys, "forget", tmp_path, "--key-file", _file(tmp_path, ["9"]))
    table = de.DynamicVariable(dim, **options)
    left = np.setdiff1d(keys, [-7, 8, 9])
    assert len(table) == len(left)
    np.testing.assert_array_equal(table.lookup(left, insert=False).numpy()[:, 0], left)


def _file(folder, lines):
    path = folder / "keys.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("key_type", ["int32", "uint64"])
def test_key_types(capsys, tmp_path, key_type):
    options = {"var_type": "file", "file_path": tmp_path, "persistent": True, "name": "t"}
    table = de.DynamicVariable(2, key_type=key_type, **options)
    keys = {"int32": [-5, 5, 2**31 - 1], "uint64": [0, 5, 2**64 - 1]}[key_type]
    table.lookup(keys)
    table.flush()
    del table
    gc.collect()
    for key in (keys[0], keys[2]):
        assert kinds(audit(capsys, key, tmp_path)[1]) == [("row", "t")]
        run(capsys, "forget", tmp_path, f"--keys={key}")
        assert audit(capsys, key, tmp_path)[0] == 0
    table = de.DynamicVariable(2, key_type=key_type, **options)
    assert table.contains(keys).numpy().tolist() == [False, True, False]


def test_strings(capsys, tmp_path):
    options = {"var_type": "file", "file_path": tmp_path, "persistent": True, "name": "t"}
    table = de.DynamicVariable(2, hash_strings=True, **options)
    table.lookup(["alice", "bob"])
    table.flush()
    del table
    gc.collect()
    assert kinds(audit(capsys, "alice", tmp_path)[1]) == [("row", "t")]
    run(capsys, "forget", tmp_path, "--keys", "alice")
    assert audit(capsys, "alice", tmp_path)[0] == 0
    table = de.DynamicVariable(2, hash_strings=True, **options)
    assert table.contains(["alice", "bob"]).numpy().tolist() == [False, True]


STEPS = ["os.fsync", "os.link", "os.mkdir"]


@pytest.mark.parametrize("step", [*STEPS, "exchange", "removal"])
def test_a_crash_before_each_step(capsys, tmp_path, step):
    rows, keys = (1000, [500]) if step == "os.link" else (250, FORGOTTEN)
    template = flush_with_marks(tmp_path / "template", rows)
    for call in range(60):
        folder = tmp_path / str(call) / "t.persistent"
        shutil.copytree(template, folder)
        crashed = False
        with pytest.MonkeyPatch.context() as patch:
            if step in STEPS:
                crash_before(patch, step, call)
            elif step == "exchange" and not call:
                patch.setattr(flushes, "exchange", _crash)
            elif step == "removal" and not call:
                patch.setattr(flushes, "remove_tree", _crash)
            try:
                cli.main(["forget", str(folder), "--keys", *map(str, keys)])
            except CrashError:
                crashed = True
        capsys.readouterr()
        opened = make(folder.parent)
        assert len(opened) in (rows, rows - len(keys))
        del opened
        gc.collect()
        assert run(capsys, "forget", folder, "--keys", *keys)[0] == 0
        assert audit(capsys, keys[-1], folder)[0] == 0
        assert step == "os.link" or marks_in(folder) == 0
        assert [name for name in os.listdir(folder) if name.endswith(".new")] == []
        opened = make(folder.parent)
        assert len(opened) == rows - len(keys)
        assert not opened.contains(keys).numpy().any()
        del opened
        gc.collect()
        if not crashed:
            break
    assert not crashed
    assert call > 0


def _crash(*_):
    raise CrashError


def test_a_file_system_without_exchange(capsys, tmp_path, monkeypatch):
    folder = flush_with_marks(tmp_path)
    before = contents(folder)
    monkeypatch.setattr(flushes, "exchange", lambda *_: False)
    error = fails(capsys, 2, "forget", tmp_path, "--keys", "150")
    assert "table.flush()" in error
    assert contents(folder) == before


def test_damage(capsys, tmp_path):
    folder = flush_with_marks(tmp_path)
    (flush,) = (folder / name for name in os.listdir(folder) if name.startswith("flush-"))
    for name in ("manifest", "index", next(n for n in os.listdir(flush) if n.endswith(".rows"))):
        content = (flush / name).read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2 + 8] ^= 1
        (flush / name).write_bytes(changed)
        before = contents(folder)
        assert name in fails(capsys, 1, "forget", tmp_path, "--keys", "150")
        assert contents(folder) == before
        (flush / name).write_bytes(content)
    (flush / "manifest").unlink()
    code, found = audit(capsys, 150, tmp_path)
    assert code == 1
    assert "an incomplete flush" in found["not_examined"][0]["why"]
    run(capsys, "forget", tmp_path, "--keys", "150")
    assert not flush.exists()
